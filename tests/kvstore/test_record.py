"""The recorder: hashes only, one salt a file, bounded, and harmless when the disk is not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvstore.replay import TierSizes, read_trace, replay
from kvstore.replay.record import TraceRecorder

CHUNK = 16
PROMPT = list(range(70_000, 70_040))


def recorded(path: Path, *prompts: tuple[str, list[int]], **more: Any) -> list[dict[str, Any]]:
    recorder = TraceRecorder(path, CHUNK, **more)
    for namespace, prompt in prompts:
        recorder.record(namespace, prompt, 7)
    recorder.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_equal_beginnings_have_equal_ids_and_namespaces_share_nothing(tmp_path: Path) -> None:
    longer = PROMPT[:32] + [1, 2, 3]
    first, second, other = recorded(tmp_path / "t", ("a", PROMPT), ("a", longer), ("b", PROMPT))
    assert first["input_length"] == 40 and first["output_length"] == 7 and first["block_size"] == CHUNK
    assert len(first["hash_ids"]) == 3
    assert first["hash_ids"][:2] == second["hash_ids"][:2] and first["hash_ids"][2] != second["hash_ids"][2]
    assert not set(first["hash_ids"]) & set(other["hash_ids"])


def test_nothing_of_the_prompt_is_in_the_file_and_the_salt_is_new_each_time(tmp_path: Path) -> None:
    (one,) = recorded(tmp_path / "one", ("secret-tenant", PROMPT))
    (two,) = recorded(tmp_path / "two", ("secret-tenant", PROMPT))
    assert not set(one["hash_ids"]) & set(two["hash_ids"])
    text = (tmp_path / "one").read_text()
    assert "secret-tenant" not in text and not any(str(token) in text for token in PROMPT)
    assert set(one) == {"timestamp", "input_length", "output_length", "hash_ids", "block_size"}
    assert (tmp_path / "one").stat().st_mode & 0o077 == 0


def test_what_was_recorded_can_be_replayed(tmp_path: Path) -> None:
    recorded(tmp_path / "t.jsonl", ("", PROMPT), ("", PROMPT))
    trace = read_trace(tmp_path / "t.jsonl")
    assert trace.block_tokens == CHUNK
    assert replay(trace, "lru", TierSizes(10)).hit_rate == pytest.approx(0.5)


def test_the_size_is_bounded(tmp_path: Path) -> None:
    recorded(tmp_path / "t", *[("", PROMPT)] * 100, max_bytes=2000)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["t", "t.1"]
    assert all((tmp_path / name).stat().st_size < 2300 for name in names)


def test_an_older_file_is_kept_beside_the_new(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("older")
    assert len(recorded(tmp_path / "t", ("", PROMPT))) == 1
    assert (tmp_path / "t.1").read_text() == "older"


def test_a_failing_write_ends_the_recording_quietly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = TraceRecorder(tmp_path / "t", CHUNK)
    recorder._file.close()  # every write fails from now on
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            recorder.record("", PROMPT, 1)
        recorder.record("", [2**40], 1)  # no token id: dropped
        recorder.close()
    assert [record.message for record in caplog.records if "recording ends" in record.message]
    assert len(caplog.records) == 1 and recorder.dropped == 1


def test_a_folder_that_cannot_be_made_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        TraceRecorder(tmp_path / "file" / "t", CHUNK)
