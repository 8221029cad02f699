"""``[trace] record``: a running server records what ``kvgate replay`` can read, and nothing of the prompt."""

from __future__ import annotations

from pathlib import Path

import httpx

from kvstore.replay import TierSizes, read_trace, replay

from .server import ServerProcess, write_config


def test_what_a_server_records_can_be_replayed(tmp_path: Path) -> None:
    file = tmp_path / "traces" / "own.jsonl"
    config = write_config(tmp_path, trace={"record": str(file)}, prefix_cache={"chunk_size": 64})
    message = "The zebra keeps the ledger of the pump house. " * 40
    with ServerProcess(config) as server:
        for _ in range(2):
            body = {"model": "demo", "messages": [{"role": "user", "content": message}], "max_tokens": 2}
            url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
            assert httpx.post(url, json=body, timeout=120).status_code == 200
    trace = read_trace(file)
    assert len(trace) == 2 and trace.block_tokens == 64
    assert replay(trace, "lru", TierSizes(100)).hit_rate > 0.4
    assert "zebra" not in file.read_text()
