"""Cross-origin requests from web pages (the Fetch standard's CORS protocol): off unless origins are configured."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = "GET, POST, DELETE, OPTIONS"
_EXPOSED = "x-request-id, x-prefix-cache, retry-after"
_PREFLIGHT_SECONDS = "600"


class CrossOrigin:
    """Lets pages of the given origins read answers, errors too. Cookies are never part of it, so keys aren't either.

    Args:
        app: what is answered.
        origins: as browsers send them; ``*`` = all.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        allowed = self._allowed(headers.get("origin", ""))
        if not allowed:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(allowed, headers, send)
        else:
            await self._app(scope, receive, _with_origin(allowed, send))

    def _allowed(self, origin: str) -> str:
        if not origin:
            return ""
        if "*" in self._origins:
            return "*"
        return origin if origin in self._origins else ""


async def _preflight(allowed: str, asked: Headers, send: Send) -> None:
    """Answered here: a browser asks before it sends a key."""
    headers = MutableHeaders(
        {
            "access-control-allow-origin": allowed,
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": asked.get("access-control-request-headers", "authorization, content-type"),
            "access-control-max-age": _PREFLIGHT_SECONDS,
            "vary": "Origin",
        }
    )
    await send({"type": "http.response.start", "status": 204, "headers": headers.raw})
    await send({"type": "http.response.body", "body": b""})


def _with_origin(allowed: str, send: Send) -> Send:
    async def send_with_origin(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message["headers"]))
            headers["access-control-allow-origin"] = allowed
            headers["access-control-expose-headers"] = _EXPOSED
            headers.add_vary_header("Origin")
            message = {**message, "headers": headers.raw}
        await send(message)

    return send_with_origin
