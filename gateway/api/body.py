"""Request bodies: bounded, strict JSON, one object."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Request

from gateway.api.errors import ApiError

#: Deeper nesting has no use in this API and costs stack in everything that walks it.
MAX_DEPTH = 100

#: An oversized body is read and thrown away up to this size: a client that is still sending sees no answer.
_DISCARD_BYTES = 64 * 2**20


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The raw body.

    Raises:
        ApiError: 413 when it is too large (what was read of it is not kept), 400 when it is announced as something
            else than JSON. No announcement at all is fine.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and not (kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))):
        raise ApiError(
            400, f"content-type {kind[:60]!r} is not JSON; send application/json", code="invalid_content_type"
        )
    announced = request.headers.get("content-length", "")
    size = 0
    parts: list[bytes] = []
    if not (announced.isdigit() and int(announced) > _DISCARD_BYTES + max_bytes):
        async for part in request.stream():
            size += len(part)
            if size <= max_bytes:
                parts.append(part)
            else:
                parts.clear()
            if size > max_bytes + _DISCARD_BYTES:
                break
    if size > max_bytes or (announced.isdigit() and int(announced) > max_bytes):
        message = f"the body is larger than {max_bytes} bytes; send less, or raise [server].max_body_mb"
        raise ApiError(413, message, code="body_too_large")
    return b"".join(parts)


def parse_object(body: bytes) -> dict[str, Any]:
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
    if _too_deep(parsed):
        raise ApiError(400, f"the JSON is nested deeper than {MAX_DEPTH} levels; flatten it", code="invalid_json")
    return parsed


def _too_deep(value: dict[str, Any]) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True
