"""The HTTP face on a scripted engine: answers, streams, refusals, keys, health, metrics. A real server, real clients."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from gateway.auth.keys import KeyCheck
from gateway.auth.namespace import Namespaces
from gateway.config import Settings
from gateway.engine.types import EngineClosed, EngineError, EngineOverloaded, FinishReason
from gateway.observe.logs import setup_logging

from .scripted import REPLY, Running, data_lines, serving, wait_for

TEXT = "".join(REPLY)
KEY = "sk-unified-0123456789abcdef"
HI = [{"role": "user", "content": "hi"}]
ENVELOPE = {"message", "type", "param", "code"}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == ENVELOPE
    assert body["error"]["message"] and "Traceback" not in response.text and "/gateway/" not in response.text
    return dict(body["error"])


def post(server: Running, body: bytes, **headers: str) -> httpx.Response:
    return server.http.post("/v1/chat/completions", content=body, headers=headers)


# Answers


def test_a_whole_chat(server: Running) -> None:
    answer = server.client.chat.completions.create(model="demo-alias", messages=HI)
    assert answer.id.startswith("chatcmpl-") and answer.model == "demo-alias" and answer.object == "chat.completion"
    assert answer.choices[0].message.content == TEXT and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.completion_tokens == len(REPLY)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(REPLY)
    assert answer.usage.prompt_tokens == len(server.engine.requests[0].prompt_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0, "always there, also when cold"


def test_a_streamed_chat_is_the_same_in_pieces(server: Running) -> None:
    whole = server.chat().json()
    response = server.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = data_lines(response)
    assert lines.count("[DONE]") == 1 and lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    *answer, last = chunks
    assert answer[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in answer) == TEXT
    assert [c["choices"][0]["finish_reason"] for c in answer if c["choices"][0]["finish_reason"]] == ["stop"]
    assert answer[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(c["usage"] is None for c in answer)
    assert last["choices"] == []
    warm = {**whole["usage"], "prompt_tokens_details": {"cached_tokens": whole["usage"]["prompt_tokens"] - 1}}
    assert last["usage"] == warm


def test_without_being_asked_a_stream_has_no_usage(server: Running) -> None:
    for fields in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        chunks = [json.loads(line) for line in data_lines(server.chat(stream=True, **fields))[:-1]]
        assert all("usage" not in c and c["choices"] for c in chunks)


def test_each_of_n_answers_is_complete(server: Running) -> None:
    whole = server.client.chat.completions.create(model="demo", messages=HI, n=3, seed=2**63 - 1)
    assert [(c.index, c.message.content, c.finish_reason) for c in whole.choices] == [(i, TEXT, "stop") for i in range(3)]
    assert whole.usage is not None and whole.usage.completion_tokens == 3 * len(REPLY)
    assert whole.usage.prompt_tokens == len(server.engine.requests[0].prompt_ids), "the prompt counts once"
    assert len({r.sampling.seed for r in server.engine.requests}) == 3, "one seed, but three different answers"
    assert len({r.request_id for r in server.engine.requests}) == 3

    stream = server.client.chat.completions.create(model="demo", messages=HI, n=3, stream=True)
    texts, roles, reasons = ["", "", ""], [0, 0, 0], [0, 0, 0]
    for chunk in stream:
        choice = chunk.choices[0]
        assert reasons[choice.index] == 0, "nothing follows the finish reason"
        roles[choice.index] += choice.delta.role == "assistant"
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] += choice.finish_reason is not None
    assert texts == [TEXT] * 3 and roles == [1] * 3 and reasons == [1] * 3


def test_the_answers_of_one_prompt_begin_when_the_first_has_its_prompt(server: Running) -> None:
    server.engine.hold_after = 0
    body = {"model": "demo", "messages": HI, "n": 4, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body):
        assert len(server.engine.requests) == 1
    wait_for(lambda: len(server.engine.cancelled) == 1)
    server.engine.hold_after = None
    server.chat(n=4)
    assert len(server.engine.requests) == 5


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("one", 1), (["one", "two"], 2), ([504, 3575], 1), ([[504, 3575], [282]], 2)],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_completions_of_every_kind_of_prompt(server: Running, prompt: Any, prompts: int) -> None:
    answer = server.client.completions.create(model="demo", prompt=prompt, n=2)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(i, TEXT, "stop") for i in range(2 * prompts)]
    ids = [request.prompt_ids for request in server.engine.requests]
    assert len(ids) == 2 * prompts
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(i) for i in {tuple(i) for i in ids})
    if prompt == [[504, 3575], [282]]:
        assert sorted(ids) == [[282], [282], [504, 3575], [504, 3575]]


def test_completions_stream_and_echo(server: Running) -> None:
    echoed = server.client.completions.create(model="demo", prompt=["Once <|im_end|>", "Twice"], echo=True)
    assert [c.text for c in echoed.choices] == [f"Once <|im_end|>{TEXT}", f"Twice{TEXT}"]
    stream = server.client.completions.create(model="demo", prompt="Once", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == f"Once{TEXT}"
    server.client.completions.create(model="demo", prompt="Once")
    assert server.engine.requests[-1].sampling.max_tokens == 16, "the OpenAI API's own default"


def test_sampling_reaches_the_engine_and_null_is_unset(server: Running) -> None:
    nothing = ("temperature", "top_p", "top_k", "min_p", "stop", "max_tokens", "seed", "n", "logit_bias", "stream",
               "presence_penalty", "frequency_penalty", "repetition_penalty", "stream_options", "tools", "tool_choice",
               "response_format", "cache_salt", "logprobs", "audio", "user")  # fmt: skip
    assert server.chat(**dict.fromkeys(nothing), unknown_field={"x": 1}).status_code == 200
    plain = server.engine.requests[-1].sampling
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p, plain.seed) == (1.0, 1.0, 0, 0.0, None)
    assert plain.max_tokens == 128 - len(server.engine.requests[-1].prompt_ids), "as many as fit"
    server.chat(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, stop="END", max_tokens=2, max_completion_tokens=3, seed=-5,
        presence_penalty=-2, frequency_penalty=2, repeat_penalty=1.5, logit_bias={"7": -100, "8": 1.5}, ignore_eos=True,
    )  # fmt: skip
    full = server.engine.requests[-1].sampling
    assert (full.temperature, full.top_p, full.top_k, full.min_p, full.seed) == (0.0, 0.5, 0, 0.1, -5)
    assert (full.presence_penalty, full.frequency_penalty, full.repetition_penalty) == (-2.0, 2.0, 1.5)
    assert full.stop == ("END",) and full.max_tokens == 3 and full.logit_bias == {7: -100.0, 8: 1.5} and full.ignore_eos


@pytest.mark.parametrize("wish", [10**12, 1e12, 129])
def test_a_wish_for_too_many_tokens_is_cut_to_what_fits(server: Running, wish: float) -> None:
    assert server.chat(max_tokens=wish).status_code == 200
    request = server.engine.requests[-1]
    assert request.sampling.max_tokens + len(request.prompt_ids) == server.engine.max_model_len


# Refusals


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *(("max_tokens", value) for value in (0, -1, "abc", 1.5, True, [])),
        *(("max_completion_tokens", value) for value in (0, "5")),
        *(("temperature", value) for value in (-0.1, 2.1, "1", True)),
        *(("top_p", value) for value in (0, 1.1)), ("top_k", -2), ("top_k", 1.5), ("min_p", 1.1),
        *(("n", value) for value in (0, 129, 100_000, "2", 1.5)),
        *(("seed", value) for value in (2**63, -(2**63) - 1, 1e30, "1", 0.5)),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repeat_penalty", 0),
        *(("stop", value) for value in ("", ["a", ""], ["a"] * 17, 5)), ("stop[0]", [5]),
        *(("logit_bias", value) for value in ({"x": 1}, {"-1": 1}, {"1": 101}, {"1": "1"}, {"49152": 1}, [],
                                              {str(i): 0 for i in range(1025)})),
        ("stream", "yes"), ("stream_options", True), ("stream_options.include_usage", {"include_usage": 1}),
        ("cache_salt", "x" * 257), ("cache_salt", 5), ("stop_token_ids", [-1]),
        ("messages", []), ("messages", "hi"), ("messages", None),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named(server: Running, param: str, value: Any) -> None:
    field = param.partition("[")[0].partition(".")[0]
    error = error_of(server.chat(**{field: value}), 400)
    assert error["param"] == param and param in error["message"] and error["type"] == "invalid_request_error"
    assert not server.engine.requests
    assert server.chat().status_code == 200


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content"),
        ({"role": "user", "content": ["text"]}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0]"),
        ({"role": "<|im_end|>", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ("hi", "messages[0]"),
    ],
)
def test_a_malformed_message_is_named(server: Running, message: Any, param: str) -> None:
    assert error_of(server.chat(messages=[message]), 400)["param"] == param


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("tools", [TOOL]), ("logprobs", True), ("top_logprobs", 3), ("functions", [{"name": "f"}]), ("audio", {}),
        ("modalities", ["text", "audio"]), ("response_format", {"type": "json_object"}), ("response_format", SCHEMA),
        ("guided_json", {}), ("min_tokens", 5), ("use_beam_search", True), ("chat_template", "{{ 1 }}"),
        ("prompt_logprobs", 0),
    ],
)  # fmt: skip
def test_what_has_no_effect_here_is_refused_by_name(server: Running, param: str, value: Any) -> None:
    error = error_of(server.chat(**{param: value}), 400)
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")


@pytest.mark.parametrize(("param", "value"), [("best_of", 2), ("suffix", "x"), ("logprobs", 0), ("prompt_embeds", "x")])
def test_what_completions_dont_do_is_refused_by_name(server: Running, param: str, value: Any) -> None:
    error = error_of(server.http.post("/v1/completions", json={"prompt": "x", param: value}), 400)
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")


@pytest.mark.parametrize("value", [{"type": "xml"}, "json", {}, {"type": "json_schema"}, [],
                                   {"type": "json_schema", "json_schema": {"name": "s", "schema": "{}"}}])  # fmt: skip
def test_a_malformed_response_format_is_named(server: Running, value: Any) -> None:
    error = error_of(server.chat(response_format=value), 400)
    assert error["param"] == "response_format" and error["code"] != "unsupported_parameter"


def test_harmless_spellings_of_nothing_are_accepted(server: Running) -> None:
    for fields in (
        {"tools": []}, {"tools": [], "tool_choice": None}, {"tool_choice": "none"}, {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto"}, {"response_format": {"type": "text"}}, {"logprobs": False},
        {"modalities": ["text"]}, {"top_logprobs": 0}, {"chat_template_kwargs": {"enable_thinking": False}},
    ):  # fmt: skip
        assert server.chat(**fields).status_code == 200, fields
    assert error_of(server.chat(tool_choice="required"), 400)["param"] == "tool_choice"
    assert error_of(server.chat(tool_choice={"type": "function", "function": {"name": "f"}}), 400)["param"] == "tool_choice"


@pytest.mark.parametrize("key", ["chat_template", "tokenize", "add_generation_prompt", "return_tensors", "bos_token"])
def test_the_tokenizer_is_not_the_clients_to_steer(server: Running, key: str) -> None:
    error = error_of(server.chat(chat_template_kwargs={key: False}), 400)
    assert error["param"] == "chat_template_kwargs" and key in error["message"]


def test_huge_template_arguments_are_refused(server: Running) -> None:
    assert error_of(server.chat(chat_template_kwargs={"x": "y" * 20_000}), 400)["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("prompt", [None, "", [], [[]], ["a", ""], [1, "a"], [True], {"a": 1}, [[1], "a", 5], [99_999], [-1]])
def test_a_malformed_prompt_is_named(server: Running, prompt: Any) -> None:
    assert error_of(server.http.post("/v1/completions", json={"model": "demo", "prompt": prompt}), 400)["param"] == "prompt"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m",}', b"", b"  ", b"[1]", b'"x"', b'{"model":"\xe2\x82', b"{" + b'"a":{' * 200 + b"}" * 201,
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'\xff\xfe{"a":1}', b'{"a": "\\ud800"}',
        *(b'{"messages":[{"role":"user","content":"x"}],"temperature":' + n + b"}" for n in (b"NaN", b"Infinity", b"1e400")),
    ],
    ids=lambda body: repr(body[:12]),
)  # fmt: skip
def test_what_is_no_json_object_is_400_and_the_next_request_works(server: Running, body: bytes) -> None:
    assert error_of(post(server, body), 400)["code"] == "invalid_json"
    assert server.chat().status_code == 200


def test_the_body_is_announced_as_json_or_not_at_all(server: Running) -> None:
    good = json.dumps({"messages": HI}).encode()
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"):
        assert post(server, good, **{"content-type": kind}).status_code == 200
    assert post(server, good).status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        error = error_of(post(server, good, **{"content-type": kind}), 400)
        assert "application/json" in error["message"]


def test_a_body_over_the_limit_is_413(tokenizer: Any) -> None:
    with serving(tokenizer, server={"max_body_mb": 0.01}) as server:
        assert error_of(post(server, b"x" * 1_000_000), 413)["code"] == "body_too_large"
        pieces = iter([b"x" * 8000] * 10)  # no length announced
        assert error_of(server.http.post("/v1/chat/completions", content=pieces), 413)["code"] == "body_too_large"
        assert server.chat().status_code == 200


def test_the_context_is_full_with_both_numbers(server: Running) -> None:
    for ids, status in (([5] * 128, 400), ([5] * 500, 400), ([5] * 127, 200)):
        response = server.http.post("/v1/completions", json={"model": "demo", "prompt": ids, "max_tokens": 9})
        if status == 200:
            assert response.json()["usage"]["completion_tokens"] == 1
            assert response.json()["choices"][0]["finish_reason"] == "length"
        else:
            error = error_of(response, 400)
            assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
            assert "128" in error["message"] and str(len(ids)) in error["message"]
    assert len(server.engine.requests) == 1, "refused before any work"
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "word " * 300}])
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"


@pytest.mark.parametrize("model", ["no-such", "", "gpt-4o", "../../etc/passwd"])
def test_an_unknown_model_is_404(server: Running, model: str) -> None:
    for path, body in (("chat/completions", {"messages": HI}), ("completions", {"prompt": "x"})):
        error = error_of(server.http.post(f"/v1/{path}", json={"model": model, **body}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert server.http.post("/v1/chat/completions", json={"messages": HI}).json()["model"] == "demo"


def test_routes_and_methods(server: Running) -> None:
    assert error_of(server.http.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(server.http.get("/"), 404)["code"] == "not_found"
    wrong = server.http.get("/v1/chat/completions")
    assert error_of(wrong, 405)["code"] == "method_not_allowed" and wrong.headers["allow"] == "POST"
    options = server.http.options("/v1/chat/completions")
    assert options.status_code == 204 and options.headers["allow"] == "POST"
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        head = server.http.head(path)
        assert head.status_code == 200 and head.content == b""


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat///completions//"])
def test_odd_slashes_are_no_redirect(server: Running, path: str) -> None:
    response = server.http.post(f"{server.root}{path}", json={"messages": HI}, follow_redirects=False)
    assert response.status_code == 200
    assert server.http.get("/v1/models/").status_code == 200


# The engine's failures


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("refusal", [EngineOverloaded("full; retry"), EngineClosed("stopping; retry")])
def test_a_refusal_of_the_engine_has_its_status_also_for_a_stream(
    server: Running, refusal: EngineError, streams: bool
) -> None:
    server.engine.refuse = refusal
    response = server.chat(stream=streams, n=2)
    assert error_of(response, 503)["code"] == refusal.code
    assert response.headers["retry-after"] == str(refusal.retry_after_s)  # type: ignore[attr-defined]
    server.engine.refuse = None
    assert server.chat(stream=streams).status_code == 200


@pytest.mark.parametrize("failure", [EngineError("a step failed; see the log"), RuntimeError("secret inside")])
def test_a_failure_in_the_middle(server: Running, failure: Exception) -> None:
    server.engine.fail_after, server.engine.fail_with = 2, failure
    whole = error_of(server.chat(), 500)
    lines = data_lines(server.chat(stream=True))
    assert lines.count("[DONE]") == 1 and lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["error"] == whole
    assert "secret" not in whole["message"]
    with pytest.raises(openai.APIError):
        list(server.client.chat.completions.create(model="demo", messages=HI, stream=True))
    server.engine.fail_after = None
    assert server.chat().json()["choices"][0]["message"]["content"] == TEXT


def test_one_of_several_that_fails_ends_all(server: Running) -> None:
    server.engine.fail_after = 1
    error_of(server.chat(n=3), 500)
    wait_for(lambda: len(server.engine.cancelled) == len(server.engine.requests))


# Clients that leave


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_ends_its_work(server: Running, n: int) -> None:
    server.engine.hold_after = 2
    body = {"model": "demo", "messages": HI, "stream": True, "n": n}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
        wait_for(lambda: len(server.engine.requests) == n)
        assert not server.engine.cancelled
    wait_for(lambda: sorted(server.engine.cancelled) == sorted(r.request_id for r in server.engine.requests))


def test_leaving_before_a_whole_answer_ends_its_work(server: Running) -> None:
    server.engine.hold_after = 2
    body = json.dumps({"messages": HI}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_for(lambda: len(server.engine.requests) == 1)
        assert not server.engine.cancelled
    wait_for(lambda: len(server.engine.cancelled) == 1)
    server.engine.hold_after = None
    assert server.chat().status_code == 200


def test_leaving_in_the_middle_of_the_body_harms_nothing(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert server.chat().status_code == 200
    assert len(server.engine.requests) == 1


# Ids, headers, namespaces


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [("abc-1.2_X", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False), ("a;b", False), ("", False)],
)
def test_a_clients_id_is_echoed_when_it_is_harmless(server: Running, sent: str, echoed: bool) -> None:
    raw = [(b"x-request-id", sent.encode("latin-1"))]
    response = server.http.post("/v1/chat/completions", json={"messages": HI}, headers=raw)  # type: ignore[arg-type]
    assert (response.headers["x-request-id"] == sent) is echoed
    assert response.headers["x-request-id"]
    assert sent not in [r.request_id for r in server.engine.requests]


def test_every_answer_has_an_id_of_its_own(server: Running) -> None:
    responses = [server.chat(), server.chat(stream=True), server.chat(n=0), server.http.get("/x"), server.http.get("/health")]
    assert len({r.headers["x-request-id"] for r in responses}) == len(responses)
    same = {"x-request-id": "mine"}
    for _ in range(2):
        server.http.post("/v1/chat/completions", json={"messages": HI, "request_id": "body"}, headers=same)
    ids = [r.request_id for r in server.engine.requests]
    assert len(set(ids)) == len(ids), "the engine's ids are fresh"


def test_headers_tell_where_the_prefix_came_from(server: Running) -> None:
    assert server.chat().headers["x-prefix-cache"] == "miss; tokens=0; gpu=0; cpu=0; disk=0"
    cached = len(server.engine.requests[0].prompt_ids) - 1
    gpu, disk = cached // 2, cached - cached // 2
    for streams in (False, True):
        header = server.chat(stream=streams).headers["x-prefix-cache"]
        assert header == f"hit; tokens={cached}; gpu={gpu}; cpu=0; disk={disk}"


def test_a_salt_narrows_the_namespace(server: Running) -> None:
    def cached(**fields: Any) -> int:
        return int(server.chat(**fields).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0 and cached() > 0
    assert cached(cache_salt="a") == 0 and cached(cache_salt="a") > 0
    assert cached(cache_salt="b") == 0
    assert server.engine.requests[0].namespace == ""


def test_namespaces_come_from_the_credential() -> None:
    shared, per_key = Namespaces("shared"), Namespaces("per_key")
    assert shared.of(b"a", None) == shared.of(b"b", None) == ""
    assert shared.of(b"a", "s") == shared.of(b"b", "s") != ""
    spaces = [per_key.of(key, salt) for key in (b"", b"a", b"b") for salt in (None, "s", "t")]
    assert len(set(spaces)) == len(spaces) and "" not in spaces
    assert per_key.of(b"a", None) == Namespaces("per_key").of(b"a", None), "the same after a restart"
    assert per_key.of(b"a", "") == per_key.of(b"a", None)


def test_another_key_has_another_namespace(tokenizer: Any) -> None:
    with serving(tokenizer, prefix_cache={"namespace": "per_key"}) as server:
        spaces = []
        for headers in ({"authorization": "Bearer a"}, {"x-api-key": "a"}, {"authorization": "Bearer b"}, {}):
            server.http.post("/v1/chat/completions", json={"messages": HI}, headers=headers)
            spaces.append(server.engine.requests[-1].namespace)
        assert spaces[0] == spaces[1] and len(set(spaces)) == 3 and "" not in spaces


# Keys


@pytest.fixture
def keyed(tokenizer: Any) -> Iterator[Running]:
    with serving(tokenizer, server={"api_key": KEY}) as running:
        yield running


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}, {"authorization": KEY},
        {"authorization": "Bearer"}, {"x-api-key": KEY[:-1]}, {"x-api-key": ""}, {"authorization": f"Bearer {KEY}x"},
    ],
)  # fmt: skip
def test_a_wrong_key_is_401_before_the_body_is_looked_at(keyed: Running, headers: dict[str, str]) -> None:
    for method, path in (("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"),
                         ("GET", "/v1/models/demo")):  # fmt: skip
        response = httpx.request(method, keyed.root + path, headers=headers, content=b"not json", params={"api_key": KEY})
        error = error_of(response, 401)
        assert error["code"] == "invalid_api_key" and "[server].api_key" in error["message"]
        assert response.headers["www-authenticate"].startswith("Bearer") and KEY not in response.text


@pytest.mark.parametrize(
    "headers",
    [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bEARER  {KEY}"}, {"x-api-key": KEY},
     {"authorization": "Bearer wrong", "x-api-key": KEY}],
)  # fmt: skip
def test_the_right_key_opens(keyed: Running, headers: dict[str, str]) -> None:
    response = httpx.post(f"{keyed.url}/chat/completions", headers=headers, json={"messages": HI})
    assert response.status_code == 200


def test_the_official_client_understands_a_401(keyed: Running) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=keyed.url + "/", api_key="wrong", max_retries=0).models.list()
    assert keyed.client.models.list().data[0].id == "demo"


def test_health_needs_no_key_and_metrics_only_from_afar(keyed: Running) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert httpx.get(keyed.root + path).status_code == 200
    proxied = {"x-forwarded-for": "203.0.113.9"}
    assert httpx.get(f"{keyed.root}/metrics", headers=proxied).status_code == 401
    assert keyed.http.get("/metrics", headers=proxied).status_code == 200


def test_keys_outside_of_ascii_are_compared_too() -> None:
    from starlette.datastructures import Headers

    check = KeyCheck("schlüssel")
    raw = Headers(raw=[(b"authorization", "Bearer schlüssel".encode())])
    assert check.credential(raw) == "schlüssel".encode()
    assert check.credential(Headers({"authorization": "Bearer x"})) is None


# Health, metrics, log


def test_health_tells_what_is_reduced(server: Running) -> None:
    assert server.http.get("/health").json() == {"status": "ok", "reasons": []}
    server.engine.reasons = ["disk tier is read-only: full"]
    assert server.http.get("/health").json() == {"status": "degraded", "reasons": ["disk tier is read-only: full"]}


def test_ready_follows_the_engine(server: Running) -> None:
    assert server.http.get("/ready").status_code == 200
    server.engine.ready = False
    response = server.http.get("/ready")
    assert error_of(response, 503)["code"] == "not_ready" and int(response.headers["retry-after"]) > 0


def test_metrics_show_the_store_in_one_snapshot(server: Running) -> None:
    for line, value in {
        "kvgate_prefix_lookups_total": 7, "kvgate_prefix_lookup_tokens_total": 100,
        'kvgate_prefix_tokens_total{outcome="hit",tier="gpu"}': 30,
        'kvgate_prefix_tokens_total{outcome="hit",tier="disk"}': 20,
        'kvgate_prefix_tokens_total{outcome="miss",tier="none"}': 50,
        'kvgate_tier_bytes{tier="disk"}': 600, 'kvgate_tier_capacity_bytes{tier="disk"}': 1000,
        'kvgate_tier_chunks{tier="disk"}': 6, 'kvgate_tier_read_only{tier="disk"}': 1,
        'kvgate_tier_evictions_total{reason="capacity",tier="cpu"}': 4,
        'kvgate_tier_promotions_total{tier="disk"}': 1, 'kvgate_tier_demotions_total{tier="cpu"}': 2,
        'kvgate_dropped_stores_total{reason="queue_full"}': 3,
        'kvgate_integrity_failures_total{cause="checksum",tier="disk"}': 5,
        "kvgate_disk_read_bytes_total": 11, "kvgate_disk_write_bytes_total": 12,
        "kvgate_disk_read_seconds_total": 0.5, "kvgate_disk_write_seconds_total": 0.25,
        "kvgate_requests_running": 1, "kvgate_requests_waiting": 2, "kvgate_requests_loading": 3,
        'kvgate_device_memory_bytes{kind="arena"}': 4, "kvgate_leases": 1, 'kvgate_arena_pages{state="free"}': 9,
    }.items():  # fmt: skip
        assert server.metric(line) == value, line
    assert server.metric("kvgate_process_resident_memory_bytes") > 2**20


def test_requests_are_counted_with_bounded_labels(server: Running) -> None:
    server.chat(n=2)
    server.chat(max_tokens=1)
    server.http.get("/v1/models/some-model-nobody-has")
    server.http.request("BREW", "/some/path/nobody/has")
    assert server.metric('kvgate_requests_total{finish_reason="stop"}') == 2
    assert server.metric('kvgate_requests_total{finish_reason="length"}') == 1
    assert server.metric("kvgate_generated_tokens_total") == 2 * len(REPLY) + 1
    assert server.metric("kvgate_prompt_tokens_total") == sum(len(r.prompt_ids) for r in server.engine.requests)
    for name in ("ttft", "tpot", "queue", "e2e"):
        assert server.metric(f"kvgate_{name}_seconds_count") == 3
        assert f'kvgate_{name}_seconds_bucket{{le="0.005"}}' in server.http.get("/metrics").text
    route = 'route="/v1/chat/completions"'
    assert server.metric(f'kvgate_http_requests_total{{method="POST",{route},status="200"}}') == 2
    assert server.metric('kvgate_http_requests_total{method="GET",route="/v1/models/{model:path}",status="404"}') == 1
    assert server.metric('kvgate_http_requests_total{method="other",route="unmatched",status="404"}') == 1
    assert "nobody" not in server.http.get("/metrics").text


def test_one_line_a_request_under_the_id_the_client_knows(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.observe.logs")
    server.chat()
    server.http.post("/v1/chat/completions", json={"messages": HI}, headers={"x-request-id": "mine"})
    tokens = len(server.engine.requests[0].prompt_ids)
    cold, warm = [r.getMessage() for r in caplog.records if "prefix_hit" in r.getMessage()]
    assert cold.startswith(f"prefix_hit=false cached=0/{tokens} tiers=gpu:0,cpu:0,disk:0 ttft_ms=20.0 tokens=5 finish=stop")
    gpu, disk = (tokens - 1) // 2, (tokens - 1) - (tokens - 1) // 2
    assert warm == (
        f"prefix_hit=true cached={tokens - 1}/{tokens} tiers=gpu:{gpu},cpu:0,disk:{disk} ttft_ms=20.0 tokens=5 "
        "finish=stop request_id=mine"
    )


def test_the_line_can_be_switched_off(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.observe.logs")
    with serving(tokenizer, logging={"log_prefix_hit": False}) as server:
        server.chat()
    assert "prefix_hit" not in caplog.text


def test_the_log_never_shows_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        setup_logging(Settings(server={"api_key": KEY}, logging={"level": "warning"}))  # type: ignore[arg-type]
        logging.getLogger("gateway.x").warning("said %s", KEY)
        try:
            raise ValueError(f"bad key {KEY}")
        except ValueError:
            logging.getLogger("gateway.x").exception("failed")
        logging.getLogger("gateway.x").info("not shown at this level")
    finally:
        root.handlers[:], root.level = before
    logged = capsys.readouterr().err
    assert "said ***" in logged and "bad key ***" in logged and KEY not in logged and "not shown" not in logged


def test_an_abandoned_answer_is_never_taken_for_a_whole_one() -> None:
    from gateway.api.errors import ApiError
    from gateway.api.generation import _shown

    assert [_shown(r) for r in (FinishReason.STOP, FinishReason.LENGTH)] == ["stop", "length"]
    with pytest.raises(ApiError):
        _shown(FinishReason.ABORT)
