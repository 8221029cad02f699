"""ASGI wrappers around the whole app: path forms, request ids, request counts, the last resort for errors."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.drain import Drain, shutting_down
from gateway.api.errors import ApiError
from gateway.observe.metrics import Metrics

log = logging.getLogger(__name__)

_SAFE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_SLASHES = re.compile(r"/{2,}")


class NormalisePath:
    """Takes ``//v1/models/`` for ``/v1/models``: a redirect would turn a POST into a GET in many clients."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = _SLASHES.sub("/", scope["path"])
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)


class RequestContext:
    """Gives each request its id, counts it, and answers what nobody caught.

    The client's own ``x-request-id`` is echoed and logged when it is harmless; inside, only fresh ids are keys.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, drain: Drain, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._drain = drain
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        started = self._clock()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("ascii"))]
            await send(message)

        path = scope["path"]
        try:
            if self._drain.refuses(path):
                raise shutting_down()
            with self._drain.running(path):
                await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            log.debug("client left while sending request_id=%s", request_id)
        except Exception as error:
            answer = ApiError.of(error).answer(path, request_id)
            if status:
                raise  # too late for an envelope: the server closes the connection
            await answer(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path_format", "unmatched")
            self._metrics.http_answered(route, scope["method"], status)
            elapsed = (self._clock() - started) * 1e3
            log.debug("%s %s %d %.0f ms request_id=%s", scope["method"], scope["path"], status, elapsed, request_id)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SAFE_ID.fullmatch(value):
            return str(value.decode("ascii"))
    return f"req-{secrets.token_hex(12)}"
