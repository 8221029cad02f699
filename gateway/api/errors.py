"""The one error envelope: ``{"error": {"message", "type", "param", "code"}}``, whatever went wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gateway.engine.types import EngineError
from gateway.prompt.template import PromptError
from gateway.protocol.errors import InvalidRequest

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    502: "upstream_error",
    503: "service_unavailable_error",
    504: "upstream_error",
}

#: Everything below is answered in Anthropic's shape.
ANTHROPIC_PATH = "/v1/messages"

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

#: Sent with each 429 and 503 that names no time of its own, in seconds.
_RETRY_AFTER = "1"


class ApiError(Exception):
    """An answer that is an error. The message is for the client and says what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("retry-after", _RETRY_AFTER)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def answer(self, path: str, request_id: str | None = None) -> JSONResponse:
        """The answer of the endpoint at ``path``: each API has an envelope of its own."""
        body = anthropic_error(self, request_id) if path.startswith(ANTHROPIC_PATH) else self.body
        return JSONResponse(body, self.status, self.headers)

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """Translate whatever a request may raise; anything unforeseen is a 500 that tells nothing of the inside."""
        match error:
            case ApiError():
                return error
            case InvalidRequest():
                return cls(400, str(error), code=error.code, param=error.param)
            case PromptError():
                return cls(400, str(error), code="invalid_prompt", param=error.param)
            case EngineError():
                retry = getattr(error, "retry_after_s", None)
                headers = {"retry-after": str(retry)} if retry else {}
                return cls(error.status, str(error), code=error.code, headers=headers)
            case _:
                log.error("a request failed", exc_info=error)
                return cls(500, "the server failed on this request; its log says why", code="internal_error")


def anthropic_error(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Anthropic's envelope: ``{"type": "error", "error": {"type", "message"}}``; the message names the parameter."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": error.message}}
    return {**body, "request_id": request_id} if request_id else body


def model_not_found(model: str) -> ApiError:
    return ApiError(
        404,
        f"the model {model[:200]!r} does not exist here; GET /v1/models lists the models, and [server].api_base can "
        "forward others",
        code="model_not_found",
        param="model",
    )


def install(app: FastAPI) -> None:
    """Answer every error of the app in the envelope. What nothing here knows is RequestContext's."""

    async def translate(request: Request, error: Exception) -> Response:
        return _answered(request, ApiError.of(error))

    async def malformed(request: Request, _: Exception) -> Response:
        return _answered(request, ApiError(400, "a parameter in the URL is malformed; see docs/api.md"))

    app.add_exception_handler(RequestValidationError, malformed)
    for kind in (ApiError, InvalidRequest, PromptError, EngineError):
        app.add_exception_handler(kind, translate)
    app.add_exception_handler(HTTPException, _http_error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method = request.url.path[:200], request.method
    headers = dict(error.headers or {})
    if error.status_code == 405 and method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    if error.status_code == 404:
        said = ApiError(404, f"there is no {path}; the API lies under /v1", code="not_found")
    elif error.status_code == 405:
        message = f"{path} doesn't take {method}; use {headers.get('Allow', 'another method')}"
        said = ApiError(405, message, code="method_not_allowed", headers=headers)
    else:
        said = ApiError(error.status_code, str(error.detail), headers=headers)
    return _answered(request, said)


def _answered(request: Request, error: ApiError) -> Response:
    return error.answer(request.url.path, getattr(request.state, "request_id", None))
