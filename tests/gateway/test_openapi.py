"""The OpenAPI document against the server, and every route against bodies made from it and bodies out of nowhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi import checks

from .scripted import Running, serving

load_all_checks()
API_PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
LIMIT_S = 5
CHECKS = [
    checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance,
    schemathesis.checks.not_a_server_error,
]  # fmt: skip
QUIET = [
    HealthCheck.too_slow,
    HealthCheck.filter_too_much,
    HealthCheck.data_too_large,
    HealthCheck.function_scoped_fixture,
]


@pytest.fixture(scope="module")
def roomy(tokenizer: Any) -> Iterator[Running]:
    with serving(tokenizer) as running:
        running.engine.max_model_len = 4096
        yield running


@pytest.fixture(scope="module")
def document(roomy: Running) -> dict[str, Any]:
    return dict(roomy.http.get("/openapi.json").json())


def operations(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(path, method) for path, methods in document["paths"].items() for method in methods]


def test_it_is_open_and_ids_are_unique(roomy: Running, document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)
    assert httpx.get(f"{roomy.root}/openapi.json").status_code == 200
    text = json.dumps(document)
    named = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert named <= set(document["components"]["schemas"]), "every reference leads somewhere"
    assert "HTTPValidationError" not in text


def test_the_page_lists_every_route(document: dict[str, Any]) -> None:
    page = API_PAGE.read_text()
    missing = [
        f"{method.upper()} {path}"
        for path, method in operations(document)
        if method != "head" and f"`{method.upper()} {path}`" not in page
    ]
    assert missing == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_the_page_lists_every_parameter(document: dict[str, Any], path: str) -> None:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][body.rpartition("/")[2]]
    page = API_PAGE.read_text()
    assert [name for name in schema["properties"] if f"`{name}`" not in page] == []


def test_bodies_made_from_the_document(roomy: Running, document: dict[str, Any]) -> None:
    """Each operation with valid and invalid values: no 500, no hang, and answers as the document says."""
    schema = schemathesis.openapi.from_dict(document)
    tried = 0
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(max_examples=12, deadline=None, suppress_health_check=QUIET, database=None)
        @given(case=st.one_of(
            operation.as_strategy(), operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
        ))  # fmt: skip
        def run(case: Any) -> None:
            case.call_and_validate(base_url=roomy.root, checks=CHECKS, timeout=LIMIT_S)

        run()
        tried += 1
    assert tried == len(operations(document))


POSTS = [
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/tokenize",
    "/detokenize", "/v1/embeddings", "/v1/cache/explain",
]  # fmt: skip
FIELDS = st.sampled_from(
    "messages input prompt system tools tool_choice stream n max_tokens max_output_tokens stop stop_sequences logit_bias text "
    "response_format chat_template_kwargs temperature seed tokens previous_response_id thinking metadata include reasoning "
    "stream_options continue_final_message cache_salt output_config logprobs top_logprobs parallel_tool_calls".split()
)  # fmt: skip
WORDS = st.sampled_from(
    ["", "user", "assistant", "tool", "system", "text", "input_text", "tool_use", "tool_result", "function", "function_call",
     "json_schema", "auto", "any", "hi", "\x00", "\ud7ff", "𐀀", "<|im_end|>", "content", "role", "type", "name", "id", "input"]
)  # fmt: skip
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "name", "id", "input", "function", "arguments", "parameters", "schema", "format", "call_id",
     "tool_use_id", "json_schema", "tool_calls", "output", "cache_control", "include_usage", "budget_tokens", "effort"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=250, deadline=None, suppress_health_check=QUIET, database=None)
@given(path=st.sampled_from(POSTS), body=st.dictionaries(FIELDS, VALUES, max_size=3), base=st.booleans())
def test_bodies_out_of_nowhere(roomy: Running, path: str, body: dict[str, Any], base: bool) -> None:
    if base:
        body = {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "prompt": "hi", "max_tokens": 5, **body}
    try:
        raw = json.dumps(body).encode()
    except ValueError:
        return
    response = roomy.http.post(path, content=raw, timeout=LIMIT_S)
    assert response.status_code in (200, 400, 404, 413), (raw, response.text)
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@settings(max_examples=60, deadline=None, suppress_health_check=QUIET, database=None)
@given(path=st.sampled_from(POSTS), raw=st.binary(max_size=200))
def test_bytes_out_of_nowhere(roomy: Running, path: str, raw: bytes) -> None:
    assert roomy.http.post(path, content=raw, timeout=LIMIT_S).status_code == 400
