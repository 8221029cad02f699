"""Forwarding, against an upstream that misbehaves on purpose."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from email.utils import formatdate
from typing import Any

import httpx
import openai
import pytest

from gateway.upstream.client import versioned

from .fake_upstream import DONE, Act, FakeUpstream, Piece, Received, answer, chunk, stream
from .scripted import Running, data_lines, serving, wait_for

KEY = "sk-unified-0123456789abcdef"
WHOLE = {
    "id": "up-1", "object": "chat.completion", "created": 1, "model": "far",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hé"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13,
              "prompt_tokens_details": {"cached_tokens": 3}},
}  # fmt: skip
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}


@contextmanager
def gateway(tokenizer: Any, pieces: Sequence[Piece], suffix: str = "/v1") -> Iterator[tuple[Running, FakeUpstream]]:
    with FakeUpstream(lambda _: pieces) as upstream:
        server = {"api_base": upstream.base + suffix, "api_key": KEY}
        with serving(tokenizer, server=server) as running:
            yield running, upstream


def far(running: Running, **fields: Any) -> httpx.Response:
    return running.chat(model="far", **fields)


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("http://h", "http://h/v1"), ("http://h/", "http://h/v1"), ("http://h/v1", "http://h/v1"),
        ("http://h/v1//", "http://h/v1"), ("http://h/api/v4/", "http://h/api/v4"), ("http://h/openai", "http://h/openai/v1"),
    ],
)  # fmt: skip
def test_a_base_is_taken_with_and_without_slash_and_version(base: str, expected: str) -> None:
    assert versioned(base) == expected


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_request_goes_out_byte_for_byte_with_the_unified_key(tokenizer: Any, suffix: str) -> None:
    body = b'{ "model" : "far",\n "messages":[{"role":"user","content":"\\u00e9"}], "unknown": 1.50 }'
    headers = {
        "content-type": "application/json",
        "cookie": "a=b",
        "x-forwarded-for": "1.2.3.4",
        "x-request-id": "mine",
    }
    with gateway(tokenizer, answer(WHOLE), suffix) as (running, upstream):
        response = running.http.post("/v1/chat/completions", content=body, headers=headers)
        [sent] = upstream.received
    assert (sent.method, sent.path, sent.body) == ("POST", "/v1/chat/completions", body)
    assert sent.headers["authorization"] == f"Bearer {KEY}"
    assert not {"cookie", "x-forwarded-for", "x-request-id", "x-api-key"} & set(sent.headers)
    assert response.json() == WHOLE
    assert response.headers["x-request-id"] == "mine"


def test_completions_go_their_own_way(tokenizer: Any) -> None:
    with gateway(tokenizer, answer({"object": "text_completion", "choices": []})) as (running, upstream):
        assert running.http.post("/v1/completions", json={"model": "far", "prompt": "x"}).status_code == 200
        assert upstream.received[0].path == "/v1/completions"


def test_characters_cut_in_the_middle_arrive_whole(tokenizer: Any) -> None:
    text = "🫠 龜 한국어"
    whole = chunk(text) + chunk(finish_reason="stop") + DONE
    pieces = [whole[i : i + 1] for i in range(len(whole))]
    with gateway(tokenizer, stream(*pieces)) as (running, _):
        response = far(running, stream=True)
        assert response.content == whole
        chunks = running.client.chat.completions.create(
            model="far", messages=[{"role": "user", "content": "x"}], stream=True
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == text


@pytest.mark.parametrize(
    "pieces",
    [
        [chunk("a"), DONE],
        [chunk("a")],
        [chunk("a"), DONE, DONE],
        [chunk("a"), DONE, chunk("after the end")],
        [chunk("a"), b"data:[DONE]\r\n\r\n"],
        [chunk("a"), b"data: [DONE]"],
        [chunk("a"), b": ping\n\n", DONE],
        [chunk("a")[:-2]],
        [],
    ],
    ids=["proper", "none", "twice", "goes on", "odd", "unfinished", "comment", "no blank line", "nothing at all"],
)
def test_done_comes_exactly_once(tokenizer: Any, pieces: list[Piece]) -> None:
    with gateway(tokenizer, stream(*pieces)) as (running, _):
        lines = data_lines(far(running, stream=True))
    assert lines.count("[DONE]") == 1 and lines[-1] == "[DONE]"
    assert [json.loads(line)["choices"][0]["delta"]["content"] for line in lines[:-1]] == ["a"] * bool(pieces)


def test_an_upstream_that_keeps_the_line_after_done_does_not_keep_the_client(tokenizer: Any) -> None:
    with gateway(tokenizer, stream(chunk("a"), DONE, Act.STALL)) as (running, upstream):
        assert data_lines(far(running, stream=True))[-1] == "[DONE]"
        wait_for(upstream.left.is_set)


@pytest.mark.parametrize("ending", [Act.RESET, "closed"])
def test_an_upstream_that_breaks_off_is_an_event_then_done(tokenizer: Any, ending: Piece | str) -> None:
    half = chunk("lost")[:30]
    pieces = stream(chunk("kept"), half, Act.RESET)
    if ending == "closed":
        pieces = pieces[:-1]
    with gateway(tokenizer, pieces) as (running, _):
        lines = data_lines(far(running, stream=True))
        kept, error, done = lines
        assert json.loads(kept)["choices"][0]["delta"]["content"] == "kept"
        assert set(json.loads(error)["error"]) == {"message", "type", "param", "code"}
        assert done == "[DONE]"
        metric = 'kvgate_upstream_requests_total{outcome="failed",status="200"}'
        wait_for(lambda: running.metric(metric) == 1)
        assert running.metric('kvgate_upstream_tokens_total{kind="completion"}') == 1, "one piece was delivered"


def test_an_upstream_that_fails_at_once_costs_nothing(tokenizer: Any) -> None:
    with gateway(tokenizer, answer({"error": {"message": "no"}}, 500)) as (running, _):
        assert far(running, stream=True).status_code == 500
        assert running.metric('kvgate_upstream_requests_total{outcome="failed",status="500"}') == 1
        assert running.metric('kvgate_upstream_tokens_total{kind="completion"}') == 0


@pytest.mark.parametrize(
    "last",
    [
        [chunk(finish_reason="stop"), chunk(choices=[], usage=USAGE)],
        [chunk(finish_reason="stop"), b"data: " + json.dumps({"usage": USAGE}).encode() + b"\n\n"],
        [chunk(finish_reason="stop", usage=USAGE)],
    ],
    ids=["choices empty", "choices missing", "on the finish chunk"],
)
def test_usage_is_booked_once_in_every_shape(tokenizer: Any, last: list[bytes]) -> None:
    with gateway(tokenizer, stream(chunk("a"), *last, DONE)) as (running, _):
        assert far(running, stream=True).content == b"".join([chunk("a"), *last, DONE])
        wait_for(lambda: running.metric('kvgate_upstream_requests_total{outcome="ok",status="200"}') == 1)
        assert running.metric('kvgate_upstream_tokens_total{kind="prompt"}') == 9
        assert running.metric('kvgate_upstream_tokens_total{kind="completion"}') == 4


def test_a_compressed_answer_is_readable(tokenizer: Any) -> None:
    zipped = answer(gzip.compress(json.dumps(WHOLE).encode()), content_encoding="gzip")
    with gateway(tokenizer, zipped) as (running, _):
        response = far(running)
        assert response.json() == WHOLE and "content-encoding" not in response.headers
        assert running.metric('kvgate_upstream_tokens_total{kind="cached"}') == 3


# Errors


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "too hot", "type": "odd_error", "param": "temperature", "code": "hot"}}, "too hot"),
        ({"error": "too hot"}, "too hot"),
        ({"message": "too hot", "code": 400}, "too hot"),
        ({"detail": "too hot"}, "too hot"),
        (b"<html>Bad Request</html>", "without saying why"),
        (b"[]", "without saying why"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_an_error_keeps_its_status_and_gets_the_envelope(
    tokenizer: Any, body: bytes | dict[str, Any], message: str, streams: bool
) -> None:
    with gateway(tokenizer, answer(body, 400)) as (running, _):
        response = far(running, stream=streams)
    error = response.json()["error"]
    assert response.status_code == 400 and message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        assert error == body["error"]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"retry_after": "7"}, "7"),
        ({"retry_after": "6.2"}, "7"),
        ({"retry_after_ms": "1500", "retry_after": "9"}, "2"),
        ({"retry_after": formatdate(0, usegmt=True)}, "0"),
        ({"retry_after": "soon"}, "1"),
        ({}, "1"),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_passed_on_in_whole_seconds(
    tokenizer: Any, status: int, sent: dict[str, str], expected: str
) -> None:
    with gateway(tokenizer, answer({"error": {"message": "later"}}, status, **sent)) as (running, _):
        response = far(running)
    assert response.status_code == status and response.headers["retry-after"] == expected


def test_the_official_client_sees_the_upstreams_errors(tokenizer: Any) -> None:
    with gateway(tokenizer, answer({"error": {"message": "slow down", "code": "rate"}}, 429)) as (running, _):
        with pytest.raises(openai.RateLimitError) as limited:
            running.client.chat.completions.create(model="far", messages=[{"role": "user", "content": "x"}])
        assert limited.value.code == "rate"


def test_an_upstreams_missing_model_has_our_code(tokenizer: Any) -> None:
    vllm = {
        "error": {"message": "The model `far` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}
    }
    with gateway(tokenizer, answer(vllm, 404)) as (running, _), pytest.raises(openai.NotFoundError) as missing:
        running.client.chat.completions.create(model="far", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize("streams", [False, True])
def test_an_echoed_key_reaches_nobody(tokenizer: Any, streams: bool, caplog: pytest.LogCaptureFixture) -> None:
    said = {"error": {"message": f"Incorrect key {KEY}", "type": KEY, "param": KEY, "code": KEY}}
    in_band = stream(chunk("a"), b"data: " + json.dumps(said).encode() + b"\n\n", DONE)
    for pieces in (answer(said, 401), answer(said), in_band):
        with gateway(tokenizer, pieces) as (running, _):
            response = far(running, stream=streams)
            assert "Incorrect key ***" in response.text
            assert KEY not in response.text + str(response.headers) + running.http.get("/metrics").text
    assert KEY not in caplog.text


def test_a_refused_key_says_which(tokenizer: Any) -> None:
    with gateway(tokenizer, answer({"error": {"message": "no such key"}}, 401)) as (running, _):
        assert "[server].api_key" in far(running).json()["error"]["message"]


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        (answer(b"<html>welcome</html>", kind="text/html"), 502),
        (answer(b"[1, 2]"), 502),
        (answer(b"", 301, location="http://elsewhere/v1"), 502),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], 502),
        ([Act.RESET], 502),
        ([b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{", Act.RESET], 502),
    ],
    ids=["a web page", "no object", "redirect", "not http", "reset", "half an answer"],
)
def test_what_is_no_api_is_502(tokenizer: Any, pieces: list[Piece], status: int) -> None:
    with gateway(tokenizer, pieces) as (running, _):
        response = far(running)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert running.chat().status_code == 200, "the local model still answers"


def test_an_unreachable_upstream_says_which_setting(tokenizer: Any) -> None:
    with FakeUpstream(lambda _: []) as upstream:
        base = upstream.base
    with serving(tokenizer, server={"api_base": base}) as running:
        response = far(running)
        assert response.status_code == 502 and "api_base" in response.json()["error"]["message"]
        assert [m["id"] for m in running.http.get("/v1/models").json()["data"]] == ["demo"]


def test_a_silent_upstream_is_504(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.upstream.client.TIMEOUTS", httpx.Timeout(0.1))
    with gateway(tokenizer, [Act.STALL]) as (running, upstream):
        response = far(running)
        assert response.status_code == 504 and response.json()["error"]["code"] == "upstream_timeout"
        wait_for(upstream.left.is_set)


@pytest.mark.parametrize("pieces", [[Act.STALL], stream(chunk("a"), Act.STALL)], ids=["before", "in the middle"])
def test_a_client_that_goes_takes_the_upstreams_work_along(tokenizer: Any, pieces: list[Piece]) -> None:
    with gateway(tokenizer, pieces) as (running, upstream):
        body = {"model": "far", "messages": [], "stream": True}
        with (
            suppress(httpx.ReadTimeout),
            running.http.stream("POST", "/v1/chat/completions", json=body, timeout=1) as r,
        ):
            lines = r.iter_lines()
            next(lines)
            assert not upstream.left.is_set()
        assert upstream.received
        wait_for(upstream.left.is_set)


# Which model goes where


def test_local_models_stay_here_and_others_go(tokenizer: Any) -> None:
    with gateway(tokenizer, answer(WHOLE)) as (running, upstream):
        for model in ("demo", "demo-alias", None):
            assert running.chat(model=model).status_code == 200
        assert not upstream.received
        assert running.chat(model="").status_code == 404
        assert running.chat(model=7).status_code == 400
        assert not upstream.received
        assert far(running).status_code == 200 and len(upstream.received) == 1


def listing(request: Received) -> Sequence[Piece]:
    assert request.method == "GET" and request.path == "/v1/models"
    far_models = [{"id": "org/far", "object": "model", "owned_by": "them"}, {"id": "demo", "object": "model"}]
    return answer({"object": "list", "data": far_models})


def test_models_of_both_sides_are_listed_and_the_local_one_wins(tokenizer: Any) -> None:
    with FakeUpstream(listing) as upstream, serving(tokenizer, server={"api_base": upstream.base}) as running:
        found = running.client.models.list().data
        assert [(m.id, m.owned_by) for m in found] == [("demo", "kvgate"), ("org/far", "them")]
        assert running.client.models.retrieve("org/far").owned_by == "them"
        with pytest.raises(openai.NotFoundError):
            running.client.models.retrieve("org/none")


@pytest.mark.parametrize(
    "pieces", [answer({"data": 5}), answer(b"x"), answer({"data": [{"no": "id"}]}), answer({}, 401), [Act.RESET]]
)
def test_an_upstream_that_cant_list_its_models_is_left_out(tokenizer: Any, pieces: list[Piece]) -> None:
    with gateway(tokenizer, pieces) as (running, _):
        assert [m["id"] for m in running.http.get("/v1/models").json()["data"]] == ["demo"]
