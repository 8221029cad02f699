"""Structured output: the fields of the OpenAI, vLLM and llama.cpp APIs that say what an answer must look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.engine.grammar_spec import GrammarSpec, JsonSchema, Lark, Literal, OneOf, Regex
from gateway.protocol.errors import InvalidRequest

MAX_GUIDED_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class Structure:
    """What an answer must look like, and the parameter that says so."""

    param: str
    spec: GrammarSpec


def structure_of(body: Mapping[str, Any]) -> Structure | None:
    """What the body asks for; None = free text.

    Raises:
        InvalidRequest: malformed, or several at once.
    """
    found = [_response_format(body.get("response_format")), _structured_outputs(body.get("structured_outputs"))]
    found += [_field(param, make, body.get(param)) for param, make in _FIELDS.items()]
    asked = [structure for structure in found if structure is not None]
    if len(asked) > 1:
        raise InvalidRequest(f"{asked[0].param} and {asked[1].param} exclude each other; send one", asked[1].param)
    return asked[0] if asked else None


def _response_format(value: Any) -> Structure | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure("response_format", JsonSchema({"type": "object"}))
    if kind != "json_schema":
        raise InvalidRequest(
            'response_format must be an object whose type is "text", "json_object" or "json_schema"', "response_format"
        )
    described = value.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise InvalidRequest(
            "response_format.json_schema needs a schema object: "
            '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}',
            "response_format",
        )
    return Structure("response_format", JsonSchema(described["schema"], strict=described.get("strict") is True))


def _structured_outputs(value: Any) -> Structure | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest('structured_outputs must be an object such as {"regex": "..."}', "structured_outputs")
    given = {key: item for key, item in value.items() if key in (*_STRUCTURED, "structural_tag") and item is not None}
    if len(given) != 1 or "structural_tag" in given:
        raise InvalidRequest(
            f"structured_outputs takes exactly one of {', '.join(_STRUCTURED)}; send one of them", "structured_outputs"
        )
    ((key, item),) = given.items()
    spec = _STRUCTURED[key](item, f"structured_outputs.{key}")
    return Structure(f"structured_outputs.{key}", spec)


def _field(param: str, make: Callable[[Any, str], GrammarSpec], value: Any) -> Structure | None:
    return None if value is None else Structure(param, make(value, param))


def _json(value: Any, param: str) -> GrammarSpec:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise InvalidRequest(f"{param} is a string, but no JSON; send the schema as an object", param) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be a JSON schema object", param)
    return JsonSchema(value)


def _json_object(value: Any, param: str) -> GrammarSpec:
    if value is not True:
        raise InvalidRequest(f"{param} can only be true; leave it out for free text", param)
    return JsonSchema({"type": "object"})


def _regex(value: Any, param: str) -> GrammarSpec:
    return Regex(_text(value, param))


def _grammar(value: Any, param: str) -> GrammarSpec:
    return Lark(_text(value, param))


def _choice(value: Any, param: str) -> GrammarSpec:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise InvalidRequest(f"{param} must be a list of strings that are not empty", param)
    if len(value) > MAX_GUIDED_CHOICES:
        raise InvalidRequest(f"{param} has {len(value)} choices; at most {MAX_GUIDED_CHOICES} are allowed", param)
    return OneOf(tuple(Literal(item) for item in dict.fromkeys(value)))


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(f"{param} must be a string that is not empty", param)
    return value


_STRUCTURED: dict[str, Callable[[Any, str], GrammarSpec]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}

#: vLLM's older names, and llama.cpp's for a grammar.
_FIELDS: dict[str, Callable[[Any, str], GrammarSpec]] = {
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "grammar": _grammar,
}
