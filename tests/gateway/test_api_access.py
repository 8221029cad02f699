"""Around the answers: clients that leave, ids, namespaces, keys, health, metrics, log. A real server, real clients."""

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
from gateway.observe.logs import setup_logging

from .scripted import REPLY, Running, serving, wait_for

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


# Clients that leave


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_ends_its_work(server: Running, n: int) -> None:
    server.engine.hold_after = 2
    body = {"model": "demo", "messages": HI, "stream": True, "n": n}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
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
    [
        ("abc-1.2_X", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("é", False),
        ("a;b", False),
        ("", False),
    ],
)
def test_a_clients_id_is_echoed_when_it_is_harmless(server: Running, sent: str, echoed: bool) -> None:
    raw = [(b"x-request-id", sent.encode("latin-1"))]
    response = server.http.post("/v1/chat/completions", json={"messages": HI}, headers=raw)  # type: ignore[arg-type]
    assert (response.headers["x-request-id"] == sent) is echoed
    assert response.headers["x-request-id"]
    assert sent not in [r.request_id for r in server.engine.requests]


def test_every_answer_has_an_id_of_its_own(server: Running) -> None:
    responses = [
        server.chat(),
        server.chat(stream=True),
        server.chat(n=0),
        server.http.get("/x"),
        server.http.get("/health"),
    ]
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
        response = httpx.request(
            method, keyed.root + path, headers=headers, content=b"not json", params={"api_key": KEY}
        )
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


def test_requests_are_counted_with_bounded_labels(fresh_server: Running) -> None:
    server = fresh_server
    server.chat(n=2)
    server.chat(max_tokens=1)
    server.http.get("/v1/models/some-model-nobody-has")
    server.http.request("PROPFIND", "/some/path/nobody/has")
    assert server.metric('kvgate_requests_total{finish_reason="stop"}') == 2
    assert server.metric('kvgate_requests_total{finish_reason="length"}') == 1
    assert server.metric("kvgate_generated_tokens_total") == 2 * len(REPLY) + 1
    assert server.metric("kvgate_prompt_tokens_total") == sum(len(r.prompt_ids) for r in server.engine.requests)
    for name in ("ttft", "tpot", "queue", "e2e"):
        assert server.metric(f"kvgate_{name}_seconds_count") == 3
        assert f'kvgate_{name}_seconds_bucket{{le="0.005"}}' in server.http.get("/metrics").text
    route = 'route="/v1/chat/completions"'
    assert server.metric(f'kvgate_http_requests_total{{method="POST",{route},status="200"}}') == 2
    assert server.metric('kvgate_http_requests_total{method="GET",route="/v1/models/{model}",status="404"}') == 1
    assert server.metric('kvgate_http_requests_total{method="other",route="unmatched",status="404"}') == 1
    assert "nobody" not in server.http.get("/metrics").text


def test_one_line_a_request_under_the_id_the_client_knows(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.observe.logs")
    server.chat()
    server.http.post("/v1/chat/completions", json={"messages": HI}, headers={"x-request-id": "mine"})
    tokens = len(server.engine.requests[0].prompt_ids)
    cold, warm = [r.getMessage() for r in caplog.records if "prefix_hit" in r.getMessage()]
    assert cold.startswith(
        f"prefix_hit=false cached=0/{tokens} tiers=gpu:0,cpu:0,disk:0 ttft_ms=20.0 tokens=5 finish=stop"
    )
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
