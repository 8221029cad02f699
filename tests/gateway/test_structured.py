"""Structured output over HTTP: every spelling reaches the engine as the same grammar, malformed ones are named."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.engine.grammar import MAX_GRAMMAR_BYTES
from gateway.engine.grammar_spec import JsonSchema, Lark, Literal, OneOf, Regex
from gateway.protocol.errors import InvalidRequest
from gateway.protocol.structured import structure_of

from .scripted import Running

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "spec"),
    [
        ({"response_format": {"type": "json_object"}}, JsonSchema({"type": "object"})),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, JsonSchema(SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}}, JsonSchema(SCHEMA, strict=True)),
        ({"guided_json": SCHEMA}, JsonSchema(SCHEMA)),
        ({"guided_json": '{"type": "object"}'}, JsonSchema({"type": "object"})),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, JsonSchema(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, JsonSchema({"type": "object"})),
        ({"guided_regex": "a+"}, Regex("a+")),
        ({"structured_outputs": {"regex": "a+"}}, Regex("a+")),
        ({"guided_choice": ["a", "b", "a"]}, OneOf((Literal("a"), Literal("b")))),
        ({"guided_grammar": 'root ::= "a"'}, Lark('root ::= "a"')),
        ({"grammar": 'start: "a"'}, Lark('start: "a"')),
    ],
)  # fmt: skip
def test_every_spelling(body: dict[str, Any], spec: Any) -> None:
    structure = structure_of({**body, "guided_regex": body.get("guided_regex")})
    assert structure is not None and structure.spec == spec


def test_free_text_is_nothing() -> None:
    for body in ({}, {"response_format": None}, {"response_format": {"type": "text"}}, {"guided_json": None}):
        assert structure_of(body) is None


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("guided_json", "{"), ("guided_json", [1]), ("guided_regex", 5), ("guided_regex", ""), ("guided_choice", []),
        ("guided_choice", ["a", 1]), ("guided_choice", ["x"] * 1025), ("guided_choice", "ab"), ("guided_grammar", {}), ("grammar", " "),
        ("structured_outputs", "x"), ("structured_outputs", {}), ("structured_outputs", {"structural_tag": {}}),
        ("structured_outputs", {"json": {}, "regex": "a"}),
    ],
)  # fmt: skip
def test_malformed_ones_are_named(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        structure_of({param: value})
    assert caught.value.param == param and param in str(caught.value)


def test_two_at_once_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="exclude"):
        structure_of({"guided_regex": "a", "response_format": {"type": "json_object"}})


def test_a_grammar_goes_with_each_answer(server: Running) -> None:
    assert server.chat(n=2, response_format={"type": "json_object"}).status_code == 200
    assert all(request.grammar is not None for request in server.engine.requests)
    server.http.post("/v1/completions", json={"prompt": "x", "guided_choice": ["a"]}).raise_for_status()
    assert server.engine.requests[-1].grammar is not None
    server.chat()
    assert server.engine.requests[-1].grammar is None


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1:1/x"}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"strict": True, "schema": {"not": {}}}}),
        ("guided_regex", "(a"), ("guided_grammar", "start: nowhere"),
    ],
)  # fmt: skip
def test_hostile_schemas_are_400_and_the_next_request_works(server: Running, param: str, value: Any) -> None:
    response = server.chat(**{param: value})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and error["code"] == "invalid_grammar"
    assert not server.engine.requests
    assert server.chat(response_format={"type": "json_object"}).status_code == 200
