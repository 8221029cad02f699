"""The OpenAPI document of this server, as it is: made from the routes and from the types that check bodies."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gateway.api.errors import ANTHROPIC_PATH
from gateway.api.openapi_bodies import BODIES, STREAMING, body_schema

_OPEN = ("/health", "/ready", "/metrics", "/openapi.json")

_NULLABLE = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE,
                "code": _NULLABLE,
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}


def install(app: FastAPI) -> None:
    """Serve the document at ``/openapi.json``."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def document(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ids that GET and HEAD share; they get their own below
        made = get_openapi(title="kvgate", version=version("kvgate"), routes=app.routes)
    components = made.setdefault("components", {})
    components["schemas"] = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path, method, operation in _operations(made):
        _describe(path, method, operation, components["schemas"])
    return made


def _operations(made: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _describe(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    operation["operationId"] = f"{method}{path}".translate(str.maketrans("/{}", "___")).strip("_")
    # No answer is in FastAPI's own shape of a validation error.
    operation["responses"] = {"200": _ok(path, method), "4XX": _failure(path), "5XX": _failure(path)}
    if path not in _OPEN:
        operation["security"] = [{"bearer": []}, {"x-api-key": []}]
    if path in BODIES and method == "post":
        name = BODIES[path].__name__
        schemas[name] = body_schema(BODIES[path], schemas)
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
        }


def _ok(path: str, method: str) -> dict[str, Any]:
    if method == "head":
        return {"description": "The head of the GET answer"}
    if path == "/metrics":
        return {"description": "Prometheus text", "content": {"text/plain": {}}}
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in STREAMING:
        content["text/event-stream"] = {}
    return {"description": "The answer", "content": content}


def _failure(path: str) -> dict[str, Any]:
    name = "AnthropicError" if path.startswith(ANTHROPIC_PATH) else "Error"
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": "What is wrong, and what to do", "content": {"application/json": {"schema": schema}}}
