"""Hits from every tier, after a restart, after every kind of ending; always the cold answer."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from .server import ServerProcess, write_config
from .texts import chat, document

QUESTION = "Which team checks rule 7?"


def answer(client: OpenAI, system: str, question: str = QUESTION, max_tokens: int = 16) -> tuple[str, int, int, str]:
    """Text, cached tokens, prompt tokens and the x-prefix-cache header of a greedy answer."""
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=chat(system, question), max_tokens=max_tokens, temperature=0
    )
    parsed = raw.parse()
    assert parsed.usage is not None and parsed.usage.prompt_tokens_details is not None
    return (
        parsed.choices[0].message.content or "",
        parsed.usage.prompt_tokens_details.cached_tokens or 0,
        parsed.usage.prompt_tokens,
        raw.headers["x-prefix-cache"],
    )


def wait_for_disk(server: ServerProcess, chunks: int) -> None:
    deadline = time.monotonic() + 20
    while server.metric("kvgate_tier_chunks", tier="disk") < chunks:
        assert time.monotonic() < deadline, "chunks were not written behind to disk"
        time.sleep(0.1)


def test_a_second_request_skips_the_prefix_and_answers_the_same(server: ServerProcess) -> None:
    prefix = document(21, 60)
    cold_text, cached, _, header = answer(server.client, prefix)
    assert cached < 12, "at most the template's own first words"
    warm_text, cached, prompt, header = answer(server.client, prefix)
    assert warm_text == cold_text
    assert cached == prompt - 1, "the same prompt again: all but the last token, whose logits are needed"
    assert header.startswith("hit") and f"tokens={cached}" in header and f"gpu={cached}" in header
    _, cached, prompt, _ = answer(server.client, prefix, "And who checks rule 9?")
    assert prompt - 40 < cached < prompt, "another question: every token of the prefix, also past the last whole chunk"


def test_the_log_line_tells_the_hit(server: ServerProcess) -> None:
    prefix = document(22, 40)
    answer(server.client, prefix)
    answer(server.client, prefix)
    lines = [line for line in server.log.splitlines() if "prefix_hit=" in line]
    assert re.search(r"prefix_hit=true cached=\d+/\d+ tiers=\S+ ttft_ms=\d", lines[-1])


def test_every_tier_and_a_restart_give_the_cold_answer(tmp_path: Path) -> None:
    """0.11 GiB of arena hold 2,560 tokens: one prompt of 1,600 tokens pushes the one before out to host memory."""
    config = write_config(tmp_path, prefix_cache={"device_cache_gb": 0.115, "cpu_cache_gb": 0.5})
    prefix = document(31, 85)
    with ServerProcess(config) as server:
        cold_text, cached, prompt, _ = answer(server.client, prefix)
        assert cached == 0 and prompt > 1300
        answer(server.client, document(32, 95))
        text, cached, _, header = answer(server.client, prefix)
        assert text == cold_text and cached == prompt - 1
        assert int(re.search(r"cpu=(\d+)", header).group(1)) > prompt // 2, header  # type: ignore[union-attr]
        assert server.metric("kvgate_tier_demotions_total", tier="cpu") > 0
        assert server.metric("kvgate_tier_promotions_total", tier="cpu") > 0
        wait_for_disk(server, prompt // 256)
        assert server.stop() == 0
    with ServerProcess(config) as server:
        text, cached, _, header = answer(server.client, prefix)
        assert text == cold_text and cached == prompt - 1
        assert f"disk={cached}" in header
        text, cached, _, header = answer(server.client, prefix)
        assert text == cold_text and f"gpu={cached}" in header, "promoted on the hit"
        server.stop(signal.SIGKILL)
    with ServerProcess(config) as server:
        text, cached, _, header = answer(server.client, prefix)
        assert text == cold_text and f"disk={cached}" in header, "kill -9 loses nothing that was written"


@pytest.mark.parametrize("ending", ["stop", "length", "disconnect"])
def test_a_hit_does_not_depend_on_how_the_earlier_request_ended(server: ServerProcess, ending: str) -> None:
    seed = {"stop": 41, "length": 42, "disconnect": 43}[ending]
    prefix = document(seed, 25)
    body = {"model": "demo", "messages": chat(prefix, QUESTION), "temperature": 0, "stream": True, "max_tokens": 24}
    if ending == "length":
        body["max_tokens"] = 3
    if ending == "stop":
        body["stop"] = ["e"]
    with httpx.stream("POST", f"{server.url}/chat/completions", json=body, timeout=60) as response:
        for count, _ in enumerate(response.iter_lines()):
            if ending == "disconnect" and count > 6:
                break
    warm = answer(server.client, prefix, QUESTION, 16)
    assert warm[1] > 0
    salted = OpenAI(base_url=server.url, api_key="none").chat.completions.create(
        model="demo", messages=chat(prefix, QUESTION), max_tokens=16, temperature=0, extra_body={"cache_salt": ending}
    )  # type: ignore[call-overload]
    assert salted.usage.prompt_tokens_details.cached_tokens == 0, "another salt never sees the cached prefix"
    assert warm[0] == salted.choices[0].message.content


def test_prefix_lengths_around_chunk_edges_hit_and_answer_as_cold(server: ServerProcess) -> None:
    base = [(17 * i) % 40000 + 300 for i in range(600)]

    def ask(ids: list[int], salt: str) -> tuple[str, int]:
        done = server.client.completions.create(
            model="demo", prompt=ids, max_tokens=8, temperature=0, extra_body={"cache_salt": salt}
        )
        assert done.usage is not None and done.usage.prompt_tokens_details is not None
        return done.choices[0].text, done.usage.prompt_tokens_details.cached_tokens or 0

    ask(base, "edges")
    for length in (255, 256, 257, 512):
        prompt = [*base[:length], 1000, 1001, 1002]
        warm, cached = ask(prompt, "edges")
        assert cached >= length, f"{length} shared tokens, {cached} reused"
        cold, none = ask(prompt, f"cold-{length}")
        assert none == 0
        assert warm == cold, f"prefix of {length}"


def test_metrics_add_up(server: ServerProcess) -> None:
    answer(server.client, document(51, 30))
    answer(server.client, document(51, 30))
    looked_up = server.metric("kvgate_prefix_lookup_tokens_total")
    hits = server.metric("kvgate_prefix_tokens_total", outcome="hit")
    misses = server.metric("kvgate_prefix_tokens_total", outcome="miss")
    assert hits > 0 and misses > 0
    assert hits + misses == looked_up
    for name in (
        "kvgate_ttft_seconds_count", "kvgate_tpot_seconds_count", "kvgate_queue_seconds_count",
        "kvgate_engine_step_seconds_count", "kvgate_generated_tokens_total", "kvgate_prompt_tokens_total",
        "kvgate_process_resident_memory_bytes",
    ):  # fmt: skip
        assert server.metric(name) > 0, name
    assert server.metric("kvgate_device_memory_bytes", kind="arena") > 0
    assert server.metric("kvgate_tier_bytes", tier="gpu") > 0


def test_a_client_that_goes_away_stops_its_work(server: ServerProcess) -> None:
    body = {"model": "demo", "messages": chat("You write.", "Write a very long story."), "stream": True,
            "max_tokens": 3000, "ignore_eos": True}  # fmt: skip
    with httpx.stream("POST", f"{server.url}/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # kept: the connection closes with it
        for _ in range(5):
            next(lines)
        assert server.metric("kvgate_requests_running") == 1
    waited = time.monotonic() + 5
    while server.metric("kvgate_requests_running"):
        assert time.monotonic() < waited, "the sequence still runs after its client left"
        time.sleep(0.05)
    assert server.metric("kvgate_leases") == 0


def test_a_cancelled_wait_for_a_whole_answer_stops_too(server: ServerProcess) -> None:
    body = {"model": "demo", "messages": chat("You write.", "Write a very long story."), "max_tokens": 3000,
            "ignore_eos": True}  # fmt: skip
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/chat/completions", json=body, timeout=1.0)
    waited = time.monotonic() + 5
    while server.metric("kvgate_requests_running"):
        assert time.monotonic() < waited, "the sequence still runs after its client left"
        time.sleep(0.05)
