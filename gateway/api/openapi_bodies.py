"""Schemas of request bodies for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from gateway.protocol.anthropic import CountRequest, MessagesRequest
from gateway.protocol.requests import ChatRequest, CompletionRequest
from gateway.protocol.response_request import ResponsesRequest
from gateway.protocol.tokenise import DetokenizeRequest, TokenizeRequest


class EmbeddingsRequest(BaseModel):
    """Forwarded as it is."""

    model: str | None = None


class CacheRequest(BaseModel):
    """A chat or completion body whose prompt is meant."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[Any] | None = None
    ttl_seconds: float | None = None
    cache_salt: str | None = None


BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/tokenize": TokenizeRequest,
    "/v1/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/detokenize": DetokenizeRequest,
    **{f"/v1/cache/{name}": CacheRequest for name in ("explain", "warm", "pin", "unpin", "forget")},
}

STREAMING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})

#: pydantic's words for the bounds of a number that a validator of ours goes before.
_BOUNDS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}

_OBJECT = {"type": ["object", "null"]}
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "minItems": 1, "items": _TEXT_PART}]}
_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT = {"type": "string", "minLength": 1}
_STOP = {
    "anyOf": [{"type": "null"}, _TEXT, {"type": "array", "maxItems": 16, "items": _TEXT}],
}
_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}, "description": {"type": "string"}, "parameters": {"type": "object"}},
}
_TOOLS = {
    "type": ["array", "null"],
    "maxItems": 128,
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    },
}

#: Fields whose type says less, or something else, than what is taken: they are rewritten or read in another place.
_TRUE: dict[str, dict[str, Any]] = {
    "ChatMessage": {"content": _CONTENT},
    "ChatRequest": {
        "stop": _STOP,
        "logit_bias": {**_OBJECT, "propertyNames": {"pattern": "^[0-9]+$"}, "additionalProperties": {"type": "number"}},
        "tools": _TOOLS,
        "tool_choice": {"type": ["string", "object", "null"]},
        "parallel_tool_calls": {"type": ["boolean", "null"]},
        "response_format": {**_OBJECT, "required": ["type"]},
    },
    "CompletionRequest": {
        "prompt": {"anyOf": [_TEXT, _TOKENS, {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT, _TOKENS]}}]},
        "stop": _STOP,
        "response_format": {**_OBJECT, "required": ["type"]},
    },
    "TokenizeRequest": {"messages": {"type": "array", "items": {"type": "object"}}},
    "ResponsesRequest": {"stop": _STOP},
}


def body_schema(kind: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a body. The types it refers to are added to ``schemas``."""
    schema = kind.model_json_schema(mode="validation", ref_template="#/components/schemas/{model}")
    for name, inner in schema.pop("$defs", {}).items():
        schemas[name] = _true(name, inner)
    return _true(kind.__name__, schema)


def _true(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    schema = _renamed(schema)
    schema.setdefault("properties", {}).update(_TRUE.get(name, {}))
    return schema


def _renamed(node: Any) -> Any:
    if isinstance(node, list):
        return [_renamed(item) for item in node]
    if not isinstance(node, dict):
        return node
    # Null means unset everywhere: no default is to be told apart from it.
    return {
        _BOUNDS.get(key, key): _renamed(value)
        for key, value in node.items()
        if not (key == "default" and value is None)
    }
