"""What goes wrong upstream, said in this server's envelope and without its key."""

from __future__ import annotations

import email.utils
import math
import time
from typing import Any

import httpx
import orjson

from gateway.api.errors import ApiError

_LONGEST_MESSAGE = 2000


class Scrubber:
    """Blots the key out of whatever an upstream echoes."""

    def __init__(self, api_key: str) -> None:
        self._key = api_key

    def text(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def raw(self, data: bytes) -> bytes:
        return data.replace(self._key.encode(), b"***") if self._key else data


def error_answer(response: httpx.Response, body: bytes, scrubber: Scrubber) -> ApiError:
    """The upstream's error answer with its status, fields and Retry-After."""
    status = response.status_code
    if status < 400 or status > 599:
        return ApiError(
            502,
            f"the upstream answered with status {status}; set [server].api_base to its final address",
            code="bad_upstream",
        )
    said = _said(body)
    message = scrubber.text(str(said.get("message") or f"the upstream answered {status} without saying why"))
    if status in (401, 403):
        message += " (said by the upstream: it doesn't accept [server].api_key; check the key and [server].api_base)"
    code = said.get("code")
    if not isinstance(code, str):
        code = "model_not_found" if status == 404 and "model" in message.lower() else None
    retry = retry_after(response.headers)
    return ApiError(
        status,
        message[:_LONGEST_MESSAGE],
        code=code and scrubber.text(code),
        param=_text_or_none(said.get("param"), scrubber),
        kind=_text_or_none(said.get("type"), scrubber),
        headers={} if retry is None else {"retry-after": str(retry)},
    )


def unreachable(error: httpx.HTTPError | httpx.InvalidURL) -> ApiError:
    """No answer came, or it broke off."""
    if isinstance(error, httpx.TimeoutException):
        return ApiError(
            504,
            "the upstream of [server].api_base did not answer in time; retry, or check that it is up",
            code="upstream_timeout",
        )
    if isinstance(error, httpx.ConnectError):
        return ApiError(
            502,
            "the upstream of [server].api_base can't be reached; check that address and that a server runs there",
            code="upstream_unreachable",
        )
    return ApiError(502, "the connection to the upstream broke; send the request again", code="upstream_broken")


def not_an_api() -> ApiError:
    return ApiError(
        502,
        "what answers at [server].api_base is not an OpenAI-compatible API; check the address",
        code="bad_upstream",
    )


def retry_after(headers: httpx.Headers) -> int | None:
    """Whole seconds, from ``retry-after-ms`` or ``retry-after`` (a number or a date)."""
    try:
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            return max(0, math.ceil(float(milliseconds) / 1000))
        if (value := headers.get("retry-after")) is None:
            return None
        if value.strip().replace(".", "", 1).isdigit():
            return math.ceil(float(value))
        return max(0, math.ceil(email.utils.parsedate_to_datetime(value).timestamp() - time.time()))
    except (ValueError, OverflowError):
        return None


def _said(body: bytes) -> dict[str, Any]:
    """Message, type, param and code in the shapes that servers use."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(parsed, dict):
        return {}
    error = parsed.get("error")
    if isinstance(error, dict):
        return error
    for said in (error, parsed.get("message"), parsed.get("detail")):
        if isinstance(said, str):
            return {"message": said}
    return {}


def _text_or_none(value: Any, scrubber: Scrubber) -> str | None:
    return scrubber.text(value) if isinstance(value, str) else None
