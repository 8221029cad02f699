"""Looking into the cache of a running server and steering it; the commands on its folder when it is stopped."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from .server import KVGATE, ServerProcess, write_config
from .texts import chat, document


def post(server: ServerProcess, action: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/cache/{action}", json=body, timeout=60)
    assert response.status_code == status, response.text
    return dict(response.json())


def cached(server: ServerProcess, system: str, question: str, **more: Any) -> int:
    answer = server.client.chat.completions.create(
        model="demo", messages=chat(system, question), max_tokens=2, temperature=0, **more
    )  # type: ignore[call-overload]
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_warming_computes_a_prefix_before_it_is_asked_for(server: ServerProcess) -> None:
    system = document(201, 50)
    warmed = post(server, "warm", {"messages": chat(system, "x")[:1], "ttl_seconds": 3600})
    assert warmed["computed_tokens"] > 500 and warmed["pinned_tokens"] > 500
    assert cached(server, system, "Which team?") >= warmed["prompt_tokens"] - 3
    again = post(server, "warm", {"messages": chat(system, "x")[:1]})
    assert again["cached_tokens"] == again["prompt_tokens"] - 1


def test_explain_names_the_message_and_the_cause(server: ServerProcess) -> None:
    body = document(202, 40)
    cached(server, f"It is 2026-12-01 09:15:00. {body}", "Which team?")
    told = post(server, "explain", {"messages": chat(f"It is 2026-12-02 10:07:31. {body}", "Which team?")})
    place = told["first_divergence"]
    assert told["likely_cause"] == "timestamp" and "move it behind" in told["advice"]
    assert place["message_index"] == 0 and place["role"] == "system"
    assert place["token_index"] == told["cached_tokens"] < 40
    assert told["lost_tokens"] == told["prompt_tokens"] - 1 - told["cached_tokens"]
    assert told["expected_lost_milliseconds"] > 0
    same = post(server, "explain", {"messages": chat(f"It is 2026-12-01 09:15:00. {body}", "Which team?")})
    assert same["likely_cause"] == "complete" and same["lost_tokens"] == 0
    assert sum(same["tiers"].values()) >= same["cached_tokens"]


def test_pin_unpin_forget_and_the_overview(server: ServerProcess) -> None:
    system = document(203, 40)
    prefix = {"messages": chat(system, "x")[:1], "cache_salt": "steering"}
    missing = post(server, "pin", prefix, 404)
    assert missing["error"]["code"] == "not_cached" and "warm" in missing["error"]["message"]
    cached(server, system, "Which team?", extra_body={"cache_salt": "steering"})
    assert post(server, "pin", {**prefix, "ttl_seconds": 60})["pinned_tokens"] >= 512
    seen = httpx.get(f"{server.url}/cache", params={"cache_salt": "steering"}).json()["data"]
    assert len(seen) == 1 and seen[0]["pinned"] and "Handbook 203" in seen[0]["preview"]
    assert httpx.get(f"{server.url}/cache", params={"cache_salt": "other"}).json()["data"] == []
    assert post(server, "unpin", prefix)["unpinned_tokens"] >= 512
    whole = {"messages": chat(system, "Which team?"), "cache_salt": "steering"}
    assert post(server, "forget", whole)["forgotten_tokens"] > 0
    told = post(server, "explain", whole)
    assert told["likely_cause"] in ("evicted", "new_text")


def test_retention_pins_the_prompt(server: ServerProcess) -> None:
    cached(server, document(204, 40), "Which?", extra_body={"prompt_cache_retention": "24h", "cache_salt": "kept"})
    (seen,) = httpx.get(f"{server.url}/cache", params={"cache_salt": "kept"}).json()["data"]
    assert seen["pinned"] and seen["pinned_until"] > seen["last_access"] + 80_000


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"prompt": "a", "ttl_seconds": -1}, "ttl_seconds"),
    ],
)
def test_bad_bodies_are_400(server: ServerProcess, body: dict[str, Any], words: str) -> None:
    assert words in post(server, "pin", body, 400)["error"]["message"]
    assert post(server, "warm", {"model": "other", "prompt": "a"}, 404)["error"]["code"] == "model_not_found"


def kvgate(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([KVGATE, "cache", *args], capture_output=True, text=True, timeout=120, check=False)


def test_the_commands_on_a_stopped_servers_folder(tmp_path: Path) -> None:
    config = str(write_config(tmp_path))
    system = document(205, 40)
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"messages": chat(system, "Which team?")}))
    with ServerProcess(Path(config)) as server:
        cached(server, system, "Which team?")
        cached(server, document(206, 20), "Which team?")
        told = json.loads(kvgate("explain", str(body), "--api-base", server.url).stdout)
        assert told["likely_cause"] == "complete"
        busy = kvgate("stats", "--config", config)
        assert busy.returncode == 1 and "in use by process" in busy.stderr
    stats = kvgate("stats", "--config", config)
    assert stats.returncode == 0, stats.stderr
    total = re.findall(r"chunks (\d+)", stats.stdout)[0]
    assert f"{total} chunks, 0 bad" in kvgate("verify", "--config", config).stdout
    shown = kvgate("identity", "--config", config).stdout
    assert "weights" in shown and f"{total} chunks of this identity" in shown
    other = tmp_path / "other.toml"
    other.write_text(Path(config).read_text().replace("float32", "bfloat16"))
    differs = kvgate("identity", "--config", str(other)).stdout
    assert "differs in:" in differs and "kv_dtype" in differs and "tokenizer" not in differs.split("differs in:")[1]
    file = tmp_path / "prefix.kv"
    exported = kvgate("export", str(file), "--config", config, "--body", str(body)).stdout.split(" chunks")[0]
    assert 3 <= int(exported) < int(total)
    assert "0 chunks" in kvgate("import", str(file), "--config", config).stdout, "all of it is here already"
    assert kvgate("clear", "--config", config, "--yes").stdout.startswith(f"deleted {total}")
    refused = kvgate("import", str(file), "--config", config)
    assert refused.returncode == 1 and "another identity" in refused.stderr
