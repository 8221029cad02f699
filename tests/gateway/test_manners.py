"""Manners of the server: packed bodies, limits, pages of other origins, waiting, stopping. A real server."""

from __future__ import annotations

import gzip
import json
import signal
import threading
import time
import zlib
from typing import Any

import httpx
import pytest

from .fake_upstream import Act, FakeUpstream, chunk, stream
from .scripted import REPLY, Running, data_lines, serving, wait_for

HI = [{"role": "user", "content": "hi"}]
BODY = json.dumps({"messages": HI}).encode()


def post(server: Running, body: bytes, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.http.post("/v1/chat/completions", content=body, headers=named)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = dict(response.json()["error"])
    assert set(error) == {"message", "type", "param", "code"}
    return error


# Packed bodies


def test_packed_bodies_are_unpacked(server: Running) -> None:
    for name, packed in (
        ("gzip", gzip.compress(BODY)), ("GZIP", gzip.compress(BODY)), ("x-gzip", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)), ("identity", BODY),
    ):  # fmt: skip
        assert post(server, packed, content_encoding=name).status_code == 200, name


def test_what_cant_be_unpacked_is_400_or_415(server: Running) -> None:
    packed = gzip.compress(BODY)
    for body in (packed[:-9], packed + b"more", b"not gzip", BODY, zlib.compress(BODY)):
        assert error_of(post(server, body, content_encoding="gzip"), 400)["code"] == "invalid_encoding"
    for name in ("br", "zstd", "gzip, gzip", "?"):
        refused = post(server, packed, content_encoding=name)
        assert error_of(refused, 415)["code"] == "unsupported_encoding"
        assert refused.headers["accept-encoding"] == "gzip, deflate"
    assert server.chat().status_code == 200


def test_a_bomb_never_becomes_large(tokenizer: Any) -> None:
    with serving(tokenizer, limits={"max_body_mb": 0.1}) as server:
        bomb = gzip.compress(b" " * 200_000_000)  # 200 kB packed
        assert len(bomb) > 0.1 * 2**20
        assert error_of(post(server, bomb, content_encoding="gzip"), 413)["code"] == "body_too_large"
        small = gzip.compress(b" " * 20_000_000)
        started = time.monotonic()
        assert error_of(post(server, small, content_encoding="gzip"), 413)["code"] == "body_too_large"
        assert time.monotonic() - started < 1
        assert post(server, gzip.compress(BODY), content_encoding="gzip").status_code == 200


# Limits


def test_limits_are_configured(tokenizer: Any) -> None:
    limits = {"max_messages": 3, "max_choices": 2, "max_json_depth": 8}
    with serving(tokenizer, limits=limits) as server:
        many = error_of(server.chat(messages=HI * 4), 400)
        assert many["param"] == "messages" and "[limits].max_messages" in many["message"]
        assert error_of(server.chat(n=3), 400)["param"] == "n"
        prompts = {"prompt": ["a", "b"], "n": 2}
        assert error_of(server.http.post("/v1/completions", json=prompts), 400)["param"] == "n"
        assert error_of(server.http.post("/v1/completions", json={"prompt": ["a"] * 3}), 400)["param"] == "prompt"
        assert error_of(post(server, b'{"a":' * 9 + b"1" + b"}" * 9), 400)["code"] == "invalid_json"
        assert server.chat(messages=HI * 3, n=2).status_code == 200


def test_a_hundred_thousand_messages_are_refused_at_once(server: Running) -> None:
    started = time.monotonic()
    assert error_of(server.chat(messages=HI * 100_000), 400)["param"] == "messages"
    assert time.monotonic() - started < 2


# Pages of other origins

ORIGIN = "https://app.example"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}


def cors_of(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control")}


def test_other_origins_are_not_let_in_unless_configured(server: Running, tokenizer: Any) -> None:
    assert not cors_of(server.http.options("/v1/chat/completions", headers=PREFLIGHT))
    assert not cors_of(server.http.get("/v1/models", headers={"origin": ORIGIN}))
    with serving(tokenizer, server={"cors_origins": [ORIGIN], "api_key": "k"}) as open_server:
        stranger = {**PREFLIGHT, "origin": "https://other.example"}
        assert not cors_of(open_server.http.options("/v1/chat/completions", headers=stranger))


@pytest.mark.parametrize(("origins", "allowed"), [([ORIGIN], ORIGIN), (["*"], "*")])
def test_configured_origins_get_in_also_for_errors(tokenizer: Any, origins: list[str], allowed: str) -> None:
    with serving(tokenizer, server={"cors_origins": origins, "api_key": "k"}) as server:
        preflight = httpx.options(f"{server.url}/chat/completions", headers=PREFLIGHT)
        assert preflight.status_code == 204, "without a key"
        shown = cors_of(preflight)
        assert shown["access-control-allow-origin"] == allowed
        assert shown["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        assert "POST" in shown["access-control-allow-methods"]
        refused = httpx.get(f"{server.url}/models", headers={"origin": ORIGIN})
        assert refused.status_code == 401 and refused.headers["vary"] == "Origin"
        body = {"messages": HI, "stream": True}
        streamed = server.http.post("/v1/chat/completions", json=body, headers={"origin": ORIGIN})
        for response in (preflight, refused, streamed):
            assert response.headers["access-control-allow-origin"] == allowed
            assert "access-control-allow-credentials" not in response.headers
        assert "x-request-id" in streamed.headers["access-control-expose-headers"]


# Waiting


def test_who_waits_hears_that_somebody_is_there(tokenizer: Any) -> None:
    with serving(tokenizer, server={"ping_seconds": 0.05}) as server:
        server.engine.queue_seconds = 0.3
        response = server.chat(stream=True)
        assert response.content.count(b": ping\n\n") >= 2
        assert response.content.index(b": ping") < response.content.index(b"data:")
        pieces = [json.loads(line)["choices"][0]["delta"].get("content", "") for line in data_lines(response)[:-1]]
        assert "".join(pieces) == "".join(REPLY)
        assert "x-prefix-cache" not in response.headers, "headers went out before it was known"
        assert server.chat().headers["x-prefix-cache"]


@pytest.mark.parametrize("ping_seconds", [0.05, 5])
@pytest.mark.parametrize("streams", [False, True])
def test_who_waits_too_long_is_told(tokenizer: Any, streams: bool, ping_seconds: float) -> None:
    sections = {"server": {"ping_seconds": ping_seconds}, "limits": {"max_wait_seconds": 0.2}}
    with serving(tokenizer, **sections) as server:
        server.engine.queue_seconds = 5
        response = server.chat(stream=streams)
        if streams and ping_seconds < 0.2:
            lines = data_lines(response)
            error, done = json.loads(lines[0])["error"], lines[1]
            assert done == "[DONE]" and len(lines) == 2
        else:
            error = error_of(response, 503)
            assert response.headers["retry-after"] == "1"
        assert error["code"] == "engine_overloaded" and "max_wait_seconds" in error["message"]
        wait_for(lambda: len(server.engine.cancelled) == 1)


# Stopping


def stop(server: Running) -> None:
    server.server.handle_exit(signal.SIGTERM, None)


def test_a_stopping_server_refuses_new_work_and_ends_old_in_band(tokenizer: Any) -> None:
    with serving(tokenizer, server={"shutdown_seconds": 0.5}) as server:
        server.engine.hold_after = 2
        answers: dict[bool, httpx.Response] = {}

        def ask(streams: bool) -> None:
            answers[streams] = httpx.post(
                f"{server.url}/chat/completions", json={"messages": HI, "stream": streams}, timeout=10
            )

        asking = [threading.Thread(target=ask, args=(streams,)) for streams in (False, True)]
        for thread in asking:
            thread.start()
        wait_for(lambda: len(server.engine.requests) == 2)
        assert server.http.get("/ready").status_code == 200
        stop(server)
        not_ready = server.http.get("/ready")
        assert error_of(not_ready, 503)["code"] == "not_ready" and not_ready.headers["retry-after"]
        assert server.http.get("/health").status_code == 200
        refused = server.chat()
        assert error_of(refused, 503)["code"] == "shutting_down" and refused.headers["retry-after"] == "5"
        for thread in asking:
            thread.join(10)
        assert error_of(answers[False], 503)["code"] == "shutting_down"
        lines = data_lines(answers[True])
        assert json.loads(lines[-2])["error"]["code"] == "shutting_down" and lines[-1] == "[DONE]"


def test_running_answers_finish(tokenizer: Any) -> None:
    with serving(tokenizer, server={"shutdown_seconds": 8}) as server:
        server.engine.queue_seconds = 0.4
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/chat/completions", json={"messages": HI}))
        )
        asking.start()
        wait_for(lambda: len(server.engine.requests) == 1)
        started = time.monotonic()
        stop(server)
        asking.join(10)
        assert answers[0].status_code == 200
        wait_for(lambda: not server.engine.ready)
        assert time.monotonic() - started < 4, "it goes when it is done"


def test_a_forwarded_stream_is_ended_in_band_too(tokenizer: Any) -> None:
    sections = {"server": {"shutdown_seconds": 0.3}}
    with FakeUpstream(lambda _: stream(chunk("far"), Act.STALL)) as upstream:
        sections["server"]["api_base"] = upstream.base  # type: ignore[assignment]
        with serving(tokenizer, **sections) as server:
            body = {"model": "far", "messages": HI, "stream": True}
            with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = (line for line in response.iter_lines() if line.startswith("data: "))
                assert "far" in next(lines)
                stop(server)
                rest = list(lines)
            assert json.loads(rest[0][6:])["error"]["code"] == "shutting_down" and rest[1:] == ["data: [DONE]"]
            assert upstream.left.wait(5)
