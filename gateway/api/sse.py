"""The one writer of server-sent events, and the response that carries them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

#: Proxies close connections that are silent for a minute or less.
PING_SECONDS = 10.0


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One event, in UTF-8 whole: a character is never split over two."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


class EventStream(Response):
    """Sends a generator's bytes as they come, a comment while it is silent, and ends it as soon as the client goes.

    Args:
        content: ready events; failures have been turned into events by their maker.
        close: ends the work behind the content. Called once, whether or not the content was ever asked for anything.
        headers: added to the response's own.
        ping_seconds: silence before a ping is sent.
        ping: what is sent then.
    """

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str] | None = None,
        ping_seconds: float = PING_SECONDS,
        ping: bytes = PING,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._content = content
        self._close = close
        self._ping_seconds = ping_seconds
        self._ping = ping
        self.init_headers(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache, no-transform",
                "x-accel-buffering": "no",
                **(headers or {}),
            }
        )
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send(send))
        watcher = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watcher.cancel()
            sender.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)
            await self._close()
        if not sender.cancelled():
            sender.result()

    async def _send(self, send: Send) -> None:
        async with aclosing(with_pings(self._content, self._ping_seconds, self._ping)) as chunks:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def with_pings(
    content: AsyncGenerator[bytes, None], seconds: float, ping: bytes = PING
) -> AsyncGenerator[bytes, None]:
    """The content, with a ping whenever it is silent for so long. Closing this closes the content."""
    pending: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            pending = pending or asyncio.create_task(_next(content))
            done, _ = await asyncio.wait({pending}, timeout=seconds)
            if not done:
                yield ping
                continue
            chunk, pending = pending.result(), None
            if chunk is None:
                return
            yield chunk
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await content.aclose()


async def _next(content: AsyncIterator[bytes]) -> bytes | None:
    return await anext(content, None)
