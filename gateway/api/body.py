"""Request bodies: bounded, unpacked, strict JSON, one object."""

from __future__ import annotations

import zlib
from typing import Any

import orjson
from anyio import to_thread
from fastapi import Request

from gateway.api.errors import ApiError
from gateway.config import LimitSettings

#: An oversized body is read and thrown away up to this size: a client that is still sending sees no answer.
_DISCARD_BYTES = 64 * 2**20

#: Larger bodies are parsed on a thread, so that others are served meanwhile.
_PARSE_INLINE_BYTES = 256 * 1024

_ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def read_object(request: Request, limits: LimitSettings) -> tuple[bytes, dict[str, Any]]:
    """The body as it came (unpacked), and the JSON object it is.

    Raises:
        ApiError: see ``read_body`` and ``parse_object``.
    """
    raw = await read_body(request, limits.max_body_bytes)
    if len(raw) <= _PARSE_INLINE_BYTES:
        return raw, parse_object(raw, limits.max_json_depth)
    return raw, await to_thread.run_sync(parse_object, raw, limits.max_json_depth)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, unpacked when it is announced as gzip or deflate.

    Raises:
        ApiError: 413 when it is too large, packed or unpacked (what was read of it is not kept), 415 for another
            packing, 400 when it can't be unpacked or is announced as something else than JSON. No announcement at all
            is fine.
    """
    _check_type(request)
    body = _Collector(max_bytes, _unpacker(request))
    announced = request.headers.get("content-length", "")
    size = int(announced) if announced.isascii() and announced.isdigit() else 0
    if size <= max_bytes + _DISCARD_BYTES:
        async for part in request.stream():
            body.add(part)
            if body.received > max_bytes + _DISCARD_BYTES:
                break
    if body.too_large or size > max_bytes:
        message = f"the body is larger than {max_bytes} bytes; send less, or raise [limits].max_body_mb"
        raise ApiError(413, message, code="body_too_large")
    return body.whole()


def parse_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """Parse strict JSON: NaN, Infinity, numbers beyond a double and broken UTF-8 are errors.

    Raises:
        ApiError: 400, with the place of the fault.
    """
    if not body.strip():
        raise ApiError(400, "the body is empty; send a JSON object", code="invalid_json")
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise ApiError(400, 'the body must be a JSON object such as {"model": "..."}', code="invalid_json")
    if _too_deep(parsed, max_depth):
        raise ApiError(400, f"the JSON is nested deeper than {max_depth} levels; flatten it", code="invalid_json")
    return parsed


class _Collector:
    """Gathers the parts of a body up to a limit; beyond it they are counted and dropped."""

    def __init__(self, max_bytes: int, unpack: zlib._Decompress | None) -> None:
        self.received = 0
        self.too_large = False
        self._max_bytes = max_bytes
        self._unpack = unpack
        self._size = 0
        self._parts: list[bytes] = []

    def add(self, part: bytes) -> None:
        self.received += len(part)
        if self.too_large or not part:
            return
        if self._unpack is not None:
            part = self._unpacked(self._unpack, part)
        self._size += len(part)
        self._parts.append(part)
        if self._size > self._max_bytes:
            self.too_large = True
            self._parts.clear()

    def whole(self) -> bytes:
        if self._unpack is not None and not self._unpack.eof and self.received:
            raise _not_packed("it ends too early")
        if self._unpack is not None and self._unpack.unused_data:
            raise _not_packed("something follows its end")
        return b"".join(self._parts)

    def _unpacked(self, unpack: zlib._Decompress, part: bytes) -> bytes:
        """One byte more than allowed at most: a small bomb never becomes large here."""
        if unpack.eof:
            raise _not_packed("something follows its end")
        try:
            return unpack.decompress(part, self._max_bytes - self._size + 1)
        except zlib.error:
            raise _not_packed("it is damaged, or not packed at all") from None


def _not_packed(why: str) -> ApiError:
    return ApiError(
        400,
        f"the body can't be unpacked as its content-encoding says: {why}; send it again, or unpacked",
        code="invalid_encoding",
    )


def _unpacker(request: Request) -> zlib._Decompress | None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in _ENCODINGS:
        raise ApiError(
            415,
            f"content-encoding {encoding[:60]!r} is not understood; send gzip, deflate or no encoding",
            code="unsupported_encoding",
            headers={"accept-encoding": "gzip, deflate"},
        )
    return zlib.decompressobj(_ENCODINGS[encoding])


def _check_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and not (kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))):
        raise ApiError(
            400, f"content-type {kind[:60]!r} is not JSON; send application/json", code="invalid_content_type"
        )


def _too_deep(value: dict[str, Any], max_depth: int) -> bool:
    level: list[Any] = [value]
    for _ in range(max_depth):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True
