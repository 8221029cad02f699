"""The HTTP face on a scripted engine: answers, streams, refusals, keys, health, metrics. A real server, real clients."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from gateway.engine.types import EngineClosed, EngineError, EngineOverloaded, FinishReason

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
    assert [(c.index, c.message.content, c.finish_reason) for c in whole.choices] == [
        (i, TEXT, "stop") for i in range(3)
    ]
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
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (i, TEXT, "stop") for i in range(2 * prompts)
    ]
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
        ("top_logprobs", 21), ("top_logprobs", -1), ("logprobs", 3),
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


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("functions", [{"name": "f"}]), ("audio", {}),
        ("modalities", ["text", "audio"]), ("min_tokens", 5), ("use_beam_search", True), ("chat_template", "{{ 1 }}"),
        ("prompt_logprobs", 0),
    ],
)  # fmt: skip
def test_what_has_no_effect_here_is_refused_by_name(server: Running, param: str, value: Any) -> None:
    error = error_of(server.chat(**{param: value}), 400)
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")


@pytest.mark.parametrize(("param", "value"), [("best_of", 2), ("suffix", "x"), ("prompt_embeds", "x")])
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
    assert (
        error_of(server.chat(tool_choice={"type": "function", "function": {"name": "f"}}), 400)["param"]
        == "tool_choice"
    )


@pytest.mark.parametrize("key", ["chat_template", "tokenize", "add_generation_prompt", "return_tensors", "bos_token"])
def test_the_tokenizer_is_not_the_clients_to_steer(server: Running, key: str) -> None:
    error = error_of(server.chat(chat_template_kwargs={key: False}), 400)
    assert error["param"] == "chat_template_kwargs" and key in error["message"]


def test_huge_template_arguments_are_refused(server: Running) -> None:
    assert error_of(server.chat(chat_template_kwargs={"x": "y" * 20_000}), 400)["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], ["a", ""], [1, "a"], [True], {"a": 1}, [[1], "a", 5], [99_999], [-1]]
)
def test_a_malformed_prompt_is_named(server: Running, prompt: Any) -> None:
    assert (
        error_of(server.http.post("/v1/completions", json={"model": "demo", "prompt": prompt}), 400)["param"]
        == "prompt"
    )


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
    with serving(tokenizer, limits={"max_body_mb": 0.01}) as server:
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


def test_an_abandoned_answer_is_never_taken_for_a_whole_one() -> None:
    from gateway.api.errors import ApiError
    from gateway.api.generation import _checked

    assert [_checked(r) for r in (FinishReason.STOP, FinishReason.LENGTH)] == ["stop", "length"]
    with pytest.raises(ApiError):
        _checked(FinishReason.ABORT)
