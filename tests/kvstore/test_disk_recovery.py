"""What survives what, who may open a folder, and how failed writes end."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from kvstore.tiers.base import ChunkStats, PutOutcome
from kvstore.tiers.disk import DiskUnavailable, StoreInUse
from tests.kvstore.chunks import SMALL, make_chunk
from tests.kvstore.disk import Clock, cause_of, flip, loads, opened, put, raw, tamper

# -- restart -----------------------------------------------------------------------------------------------------


def test_a_restart_keeps_records_stats_and_bytes(tmp_path):
    chunks = [make_chunk(SMALL, seed, n_tokens=seed + 1) for seed in range(5)]
    with closing(opened(tmp_path)) as tier:
        for i, chunk in enumerate(chunks):
            deep = replace(chunk, record=replace(chunk.record, depth=i))
            put(tier, deep, ChunkStats(1, 10.0, 5.0, 0.5))
        better = ChunkStats(accesses=7, last_access=99.5, created=5.0, important_share=0.25)
        tier.update_stats([(chunks[2].record.key, better), (b"unknown", better)])
        used = tier.usage().used_bytes
    with closing(opened(tmp_path)) as tier:
        assert not tier.unclean
        assert tier.usage().used_bytes == used == sum(size for _, _, size in tier.records())
        found = {record.key: (record, stats) for record, stats, _ in tier.records()}
        for i, chunk in enumerate(chunks):
            expected = better if i == 2 else ChunkStats(1, 10.0, 5.0, 0.5)
            assert found[chunk.record.key] == (replace(chunk.record, depth=i), expected)
            assert loads(tier, chunk)


WRITER = """
import sys
from kvstore.tiers.base import PutOutcome
from tests.kvstore.chunks import SMALL, make_chunk
from tests.kvstore.disk import opened, put

tier = opened(sys.argv[1])
for seed in range(100000):
    assert put(tier, make_chunk(SMALL, seed)) is PutOutcome.STORED
    print(seed, flush=True)
"""


@pytest.mark.parametrize("kill_after", [1, 60])
def test_a_killed_writer_loses_nothing_it_reported(tmp_path, kill_after):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) >= kill_after:
            break
    writer.send_signal(signal.SIGKILL)
    seeds = [int(line), *map(int, writer.stdout.read().split())]
    writer.wait()
    with closing(opened(tmp_path)) as tier:
        assert tier.unclean
        assert all(loads(tier, make_chunk(SMALL, seed)) for seed in range(seeds[-1] + 1))
        stored = list(tier.records())
        assert len(stored) in (seeds[-1] + 1, seeds[-1] + 2)  # one more may be committed and not reported
        assert tier.usage().used_bytes == sum(size for _, _, size in stored)


def change_marker(path: Path, **changes: object) -> None:
    marker = path / "kvstore.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), **changes}))


@pytest.mark.parametrize(
    ("marker", "kept", "unclean"),
    [
        ({"state": "open", "synced": False, "boot": "another"}, False, True),
        ({"state": "open", "synced": False}, True, True),
        ({"state": "open", "synced": True, "boot": "another"}, True, True),
        ({"state": "clean", "boot": "another"}, True, False),
        ({"format": 999}, False, False),
    ],
    ids=["crashed", "killed", "crashed-durable", "rebooted", "other-format"],
)
def test_what_a_marker_says_decides_what_is_kept(tmp_path, caplog, marker, kept, unclean):
    chunk = make_chunk(SMALL)
    with closing(opened(tmp_path)) as tier:
        put(tier, chunk)
    change_marker(tmp_path, **marker)
    with caplog.at_level(logging.WARNING), closing(opened(tmp_path)) as tier:
        assert tier.unclean is unclean
        assert tier.has(chunk.record.key) is kept
        assert ("starts empty" in caplog.text) is not kept
        assert put(tier, chunk) is PutOutcome.STORED
        assert loads(tier, chunk)


def test_an_open_store_is_marked_so_and_a_durable_one_as_synced(tmp_path):
    marker = tmp_path / "kvstore.json"
    with closing(opened(tmp_path)):
        assert json.loads(marker.read_text())["state"] == "open"
        assert json.loads(marker.read_text())["synced"] is False
    assert json.loads(marker.read_text())["state"] == "clean"
    with closing(opened(tmp_path, durable=True)):
        assert (json.loads(marker.read_text())["state"], json.loads(marker.read_text())["synced"]) == ("open", True)


@pytest.mark.parametrize("content", [b"", b"not json", b"[1]"])
def test_a_damaged_marker_empties_the_store(tmp_path, content):
    with closing(opened(tmp_path)) as tier:
        put(tier, make_chunk(SMALL))
    (tmp_path / "kvstore.json").write_bytes(content)
    with closing(opened(tmp_path)) as tier:
        assert tier.usage().chunks == 0


def test_a_damaged_file_empties_the_store(tmp_path, caplog):
    with closing(opened(tmp_path)) as tier:
        put(tier, make_chunk(SMALL))
    (tmp_path / "data.mdb").write_bytes(b"x" * 100_000)
    with closing(opened(tmp_path)) as tier:
        assert "damaged" in caplog.text
        assert put(tier, make_chunk(SMALL)) is PutOutcome.STORED


def test_a_damaged_row_goes_with_its_values(tmp_path, caplog):
    good, bad = make_chunk(SMALL, 1), make_chunk(SMALL, 2)
    with closing(opened(tmp_path)) as tier:
        put(tier, good)
        put(tier, bad)
    tamper(tmp_path, b"chunks", bad.record.key, flip(3))
    with closing(opened(tmp_path)) as tier:
        assert "1 damaged" in caplog.text
        assert [record for record, _, _ in tier.records()] == [good.record]
        assert loads(tier, good)
    with raw(tmp_path, b"values") as (txn, db):
        assert [key for key, _ in txn.cursor(db)] == [good.record.key + b"\0\0"]


# -- the folder --------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_told_what_to_do(tmp_path):
    script = "import sys; from tests.kvstore.disk import opened; opened(sys.argv[1])"
    command = [sys.executable, "-c", script, str(tmp_path)]
    with closing(opened(tmp_path)):
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        assert second.returncode != 0
        assert f"StoreInUse: the disk cache folder {tmp_path} is in use by process {os.getpid()}" in second.stderr
        assert "its own folder" in second.stderr
        with pytest.raises(StoreInUse):
            opened(tmp_path)
    subprocess.run(command, capture_output=True, check=True)


def test_a_folder_that_cannot_be_made_is_refused_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "store", Path("/sys/kvstore")):
        with pytest.raises(DiskUnavailable, match=r"cannot be used: .* choose another folder"):
            opened(place)


def test_somebody_elses_lmdb_is_left_alone(tmp_path):
    with raw(tmp_path, b"theirs") as (txn, db):
        txn.put(b"a", b"b", db=db)
    with pytest.raises(DiskUnavailable, match="choose an empty folder"):
        opened(tmp_path)
    with raw(tmp_path, b"theirs") as (txn, db):
        assert txn.get(b"a", db=db) == b"b"


# -- writes that fail --------------------------------------------------------------------------------------------


@contextmanager
def no_room(path: Path) -> Iterator[None]:
    """No file of this process can grow beyond what the store has now: writes fail as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((path / "data.mdb").stat().st_size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_makes_the_tier_read_only_until_there_is_room(tmp_path, caplog):
    clock, first, second = Clock(), make_chunk(SMALL, 1), make_chunk(SMALL, 2)
    with caplog.at_level(logging.WARNING), closing(opened(tmp_path, clock=clock)) as tier:
        put(tier, first)
        used = tier.usage().used_bytes
        with no_room(tmp_path):
            for _ in range(3):
                assert put(tier, second) is PutOutcome.READ_ONLY
                clock.now += 6
                assert put(tier, second) is PutOutcome.READ_ONLY
            assert tier.usage().read_only
            assert "MiB free" in tier.usage().detail
            assert not tier.has(second.record.key)
            assert loads(tier, first)
        assert put(tier, second) is PutOutcome.READ_ONLY  # still waiting
        assert tier.usage().used_bytes == used
        clock.now += 6
        assert put(tier, second) is PutOutcome.STORED
        assert not tier.usage().read_only
        assert tier.usage().detail == ""
        assert loads(tier, second)
    assert [word in caplog.text for word in ("is read-only", "writable again")] == [True, True]
    assert len(caplog.records) == 2


def test_a_full_disk_can_be_used_again_after_a_drop(tmp_path):
    clock, chunks = Clock(), [make_chunk(SMALL, seed) for seed in range(8)]
    with closing(opened(tmp_path, clock=clock)) as tier:
        for chunk in chunks[:-1]:
            put(tier, chunk)
        with no_room(tmp_path):
            assert put(tier, chunks[-1]) is PutOutcome.READ_ONLY
            clock.now += 6
            tier.drop_many([chunk.record.key for chunk in chunks[:4]])
            assert put(tier, chunks[-1]) is PutOutcome.STORED
            assert loads(tier, chunks[-1])


def test_drops_while_read_only_are_seen_at_once_and_made_up_for(tmp_path):
    clock, chunk, other = Clock(), make_chunk(SMALL, 1), make_chunk(SMALL, 2)
    with closing(opened(tmp_path, clock=clock)) as tier:
        put(tier, chunk)
        used = tier.usage().used_bytes
        with no_room(tmp_path):
            assert put(tier, other) is PutOutcome.READ_ONLY
            tier.update_stats([(chunk.record.key, ChunkStats(9))])
            tier.drop(chunk.record.key)
        assert not tier.has(chunk.record.key)
        assert cause_of(tier, chunk) == "missing"
        assert list(tier.records()) == []
        assert tier.usage().used_bytes == used
        clock.now += 6
        assert put(tier, other) is PutOutcome.STORED
        assert tier.usage().used_bytes == used
    with closing(opened(tmp_path)) as tier:
        assert [record for record, _, _ in tier.records()] == [other.record]


def test_a_full_map_leads_the_caller_to_drop(tmp_path):
    clock, chunks = Clock(), [make_chunk(SMALL, seed) for seed in range(6)]
    with closing(opened(tmp_path, clock=clock)) as tier:
        for chunk in chunks[:-1]:
            put(tier, chunk)
        tier._env._env.set_mapsize((tmp_path / "data.mdb").stat().st_size)
        outcome = put(tier, chunks[-1])
        assert outcome is PutOutcome.READ_ONLY
        assert "MAP" in tier.usage().detail.upper()
        clock.now += 6
        for _ in range(8):
            match put(tier, chunks[-1]):
                case PutOutcome.FULL:
                    tier.drop(chunks.pop(0).record.key)
                case PutOutcome.READ_ONLY:
                    clock.now += 6
                case PutOutcome.STORED:
                    break
        assert loads(tier, chunks[-1])


def test_too_little_free_space_counts_as_read_only(tmp_path):
    clock = Clock()
    with closing(opened(tmp_path, min_free_bytes=1 << 60, clock=clock)) as tier:
        assert put(tier, make_chunk(SMALL)) is PutOutcome.READ_ONLY
        assert "floor" in tier.usage().detail
        tier._health._min_free_bytes = 0
        assert put(tier, make_chunk(SMALL)) is PutOutcome.READ_ONLY
        clock.now -= 3600  # a clock set back must not prolong the wait
        assert put(tier, make_chunk(SMALL)) is PutOutcome.STORED


def test_an_lmdb_panic_is_cured_by_opening_anew(tmp_path):
    clock, first, second = Clock(), make_chunk(SMALL, 1), make_chunk(SMALL, 2)
    with closing(opened(tmp_path, clock=clock)) as tier:
        put(tier, first)
        with pytest.raises(lmdb.PanicError), tier._env.write():
            raise lmdb.PanicError("the root page could not be written")
        before = tier._env._env
        assert put(tier, second) is PutOutcome.STORED
        assert tier._env._env is not before
        assert loads(tier, first)
        assert loads(tier, second)
