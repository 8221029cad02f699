"""Forwarding to the OpenAI-compatible server at ``[server].api_base``."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import anyio
import httpx
import orjson
from fastapi import Response

from gateway.api.drain import shutting_down
from gateway.api.errors import ApiError
from gateway.api.sse import DONE, PING_SECONDS, EventStream, event
from gateway.engine.types import EngineClosed
from gateway.observe.metrics import Metrics
from gateway.upstream.events import EventSplitter, EventTooLarge, UpstreamEvent, UpstreamTally
from gateway.upstream.failures import Scrubber, error_answer, not_an_api, unreachable

log = logging.getLogger(__name__)

#: Seconds. ``read`` is silence between bytes: a long prompt on a busy upstream takes minutes to its first token.
TIMEOUTS = httpx.Timeout(connect=10, read=600, write=60, pool=10)
_MODELS_TIMEOUT = httpx.Timeout(5)

#: How long the end of the body may come after ``[DONE]``; then the connection is given up instead of kept.
_LINGER_SECONDS = 1.0

_ANTHROPIC_VERSION = "2023-06-01"

_ERROR_BYTES = 64 * 1024

#: Idle connections are dropped before the upstream does it (uvicorn: 5 s), else a request may meet a closed one.
_KEEP_SECONDS = 3.0


class Upstream:
    """One upstream server. Requests go out byte for byte, with this server's key and none of the client's headers.

    Args:
        api_base: with or without a trailing slash, with or without ``/v1``.
        api_key: sent as a bearer token; empty = none is sent.
        metrics: told of each forwarded request.
        timeouts: of one request.
        ping_seconds: silence of a stream before the client gets a comment.
        expired: set when the server can't wait for streams any longer.
    """

    def __init__(
        self,
        api_base: str,
        api_key: str,
        metrics: Metrics,
        timeouts: httpx.Timeout | None = None,
        ping_seconds: float = PING_SECONDS,
        expired: asyncio.Event | None = None,
    ) -> None:
        self._ping_seconds = ping_seconds
        self._expired = expired or asyncio.Event()
        self._base = versioned(api_base)
        self._metrics = metrics
        self._scrubber = Scrubber(api_key)
        headers = {"user-agent": "kvgate", "accept-encoding": "identity"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=timeouts or TIMEOUTS,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=_KEEP_SECONDS),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def forward(self, path: str, body: bytes, *, ends_with_done: bool = True) -> Response:
        """The upstream's answer to a POST: streamed through when it streams.

        Args:
            path: under the API's version.
            body: sent as it is.
            ends_with_done: whether streams of this endpoint end with ``[DONE]``.

        Raises:
            ApiError: it refused, failed, or isn't there.
        """
        tally = UpstreamTally()
        headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        if path.startswith("/messages"):
            headers["anthropic-version"] = _ANTHROPIC_VERSION  # their API refuses requests without
        try:
            request = self._http.build_request("POST", self._base + path, content=body, headers=headers)
            response = await self._http.send(request, stream=True)
            if response.status_code != 200:
                raise await self._refusal(response)
            if _media_type(response) == "text/event-stream":
                relay = _Relay(response, tally, self._metrics, self._scrubber, self._expired)
                events = relay.events(ends_with_done=ends_with_done)
                return EventStream(events, relay.close, ping_seconds=self._ping_seconds)
            return await self._whole(response, tally)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            failure = unreachable(error)
            log.warning("upstream failed: %s (%s)", failure.message, type(error).__name__)
            self._metrics.upstream_answered(failure.status, "failed", tally)
            raise failure from error

    async def models(self) -> list[dict[str, Any]]:
        """What the upstream lists; nothing, and a warning in the log, when it doesn't answer."""
        try:
            response = await self._http.get(f"{self._base}/models", timeout=_MODELS_TIMEOUT)
            response.raise_for_status()
            listed = orjson.loads(response.content)["data"]
            return [model for model in listed if isinstance(model["id"], str)]
        except (httpx.HTTPError, httpx.InvalidURL, orjson.JSONDecodeError, KeyError, TypeError) as error:
            log.warning("the upstream's models are not listed: %s", self._scrubber.text(repr(error)))
            return []

    async def _refusal(self, response: httpx.Response) -> ApiError:
        body = b""
        try:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > _ERROR_BYTES:
                    break
        finally:
            await response.aclose()
        self._metrics.upstream_answered(response.status_code, "failed", UpstreamTally())
        return error_answer(response, body, self._scrubber)

    async def _whole(self, response: httpx.Response, tally: UpstreamTally) -> Response:
        try:
            content = await response.aread()
        finally:
            await response.aclose()
        try:
            parsed = orjson.loads(content)
        except orjson.JSONDecodeError:
            parsed = None
        if not isinstance(parsed, dict):
            self._metrics.upstream_answered(502, "failed", tally)
            raise not_an_api()
        tally.note(parsed)
        self._metrics.upstream_answered(200, "failed" if tally.failed else "ok", tally)
        return Response(self._scrubber.raw(content) if tally.failed else content, media_type="application/json")


class _Relay:
    """One streamed answer on its way from the upstream to the client."""

    def __init__(
        self,
        response: httpx.Response,
        tally: UpstreamTally,
        metrics: Metrics,
        scrubber: Scrubber,
        expired: asyncio.Event,
    ) -> None:
        self._expired = expired
        self._response = response
        self._tally = tally
        self._metrics = metrics
        self._scrubber = scrubber
        self._outcome = "cancelled"

    async def events(self, *, ends_with_done: bool) -> AsyncGenerator[bytes, None]:
        """The upstream's bytes, event by event, and one ``[DONE]`` whether or not the upstream sends it."""
        chunks = self._response.aiter_bytes()
        try:
            async for whole in self._whole_events(_until(self._expired, chunks)):
                yield whole
            self._outcome = "failed" if self._tally.failed else "ok"
        except (httpx.HTTPError, EventTooLarge) as error:
            self._outcome = "failed"
            failure = unreachable(error) if isinstance(error, httpx.HTTPError) else not_an_api()
            log.warning("upstream failed in the middle of an answer: %s", type(error).__name__)
            yield event(failure.body)
        except EngineClosed as error:
            self._outcome = "failed"
            yield event(ApiError.of(error).body)
        if ends_with_done:
            yield DONE
        await _read_to_end(chunks)

    async def close(self) -> None:
        """Let the upstream stop, and book what came."""
        await self._response.aclose()
        self._metrics.upstream_answered(200, self._outcome, self._tally)

    async def _whole_events(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        splitter = EventSplitter()
        async for chunk in chunks:
            passed = b""
            for found in splitter.feed(chunk):
                if found.is_done:
                    if passed:
                        yield passed
                    return
                passed += self._noted(found)
            if passed:
                yield passed
        left = splitter.finish()
        if left is not None and not left.is_done:
            yield self._noted(left)

    def _noted(self, found: UpstreamEvent) -> bytes:
        body = found.json
        if body is not None:
            self._tally.note(body)
            if body.get("error"):
                return self._scrubber.raw(found.raw)
        return found.raw


async def _until(expired: asyncio.Event, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The chunks. Raises EngineClosed when the server can't wait for the next."""
    end = asyncio.ensure_future(expired.wait())
    try:
        while True:
            coming = asyncio.ensure_future(_next(chunks))
            try:
                await asyncio.wait({coming, end}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    raise shutting_down()
                chunk = coming.result()
            finally:
                coming.cancel()
            if chunk is None:
                return
            yield chunk
    finally:
        end.cancel()


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)


def versioned(api_base: str) -> str:
    """The base with its version: ``http://host`` → ``http://host/v1``; one that ends in a version stays."""
    base = api_base.strip().rstrip("/")
    return base if re.search(r"/v\d+[a-z0-9]*$", base) else f"{base}/v1"


def _media_type(response: httpx.Response) -> str:
    return str(response.headers.get("content-type", "")).partition(";")[0].strip().lower()


async def _read_to_end(chunks: AsyncIterator[bytes]) -> None:
    """A body that was read to its end leaves a connection that can be used again."""
    with anyio.move_on_after(_LINGER_SECONDS):
        try:
            async for _ in chunks:
                pass
        except httpx.HTTPError:
            return
