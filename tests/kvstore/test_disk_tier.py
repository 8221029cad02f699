from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest
import torch

from kvstore.chunk import HEADER_BYTES
from kvstore.layout import KVLayout
from kvstore.tiers.base import ChunkStats, IntegrityError, PutOutcome, Tier
from kvstore.tiers.disk import DiskTier, DiskUnavailable, StoreInUse
from tests.kvstore.chunks import IDENTITY, ODD, SMALL, SMOLLM2, Chunk, arena_target, make_chunk

CAP = 64 * 1024 * 1024
OTHER_IDENTITY = bytes(reversed(IDENTITY))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(path: Path, layout: KVLayout = SMALL, capacity: int = CAP, **settings) -> DiskTier:
    settings.setdefault("identity", IDENTITY)
    settings.setdefault("min_free_bytes", 0)
    return DiskTier(layout, path, capacity, **settings)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with closing(opened(tmp_path / "store")) as made:
        yield made


def put(tier: Tier, chunk: Chunk, stats: ChunkStats | None = None) -> PutOutcome:
    return tier.put(chunk.record, chunk.tokens, chunk.payload, stats or ChunkStats())


def loads(tier: Tier, chunk: Chunk, layout: KVLayout = SMALL, n_tokens: int | None = None) -> bool:
    n = n_tokens or chunk.record.n_tokens
    target = arena_target(layout, n)
    tier.get_into(chunk.record, chunk.tokens, target, n)
    return torch.equal(target, chunk.kv[:, :, :, :n])


def cause_of(tier: Tier, chunk: Chunk, layout: KVLayout = SMALL) -> str:
    with pytest.raises(IntegrityError) as caught:
        loads(tier, chunk, layout)
    return caught.value.cause


@contextmanager
def raw(path: Path, database: bytes) -> Iterator[tuple[lmdb.Transaction, lmdb._Database]]:
    """Write to a closed store behind the tier's back."""
    env = lmdb.open(str(path), map_size=4 * CAP, max_dbs=4)
    with env.begin(write=True) as txn:
        yield txn, env.open_db(database, txn)
    env.close()


def tamper(path: Path, database: bytes, key: bytes, change: Callable[[bytearray], bytes | None]) -> None:
    with raw(path, database) as (txn, db):
        changed = change(bytearray(txn.get(key, db=db)))
        if changed is None:
            txn.delete(key, db=db)
        else:
            txn.put(key, bytes(changed), db=db)


def flip(offset: int) -> Callable[[bytearray], bytes]:
    def change(value: bytearray) -> bytes:
        value[offset] ^= 4
        return bytes(value)

    return change


# -- round trips -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [SMALL, ODD, SMOLLM2], ids=["bf16", "fp32", "smollm2"])
@pytest.mark.parametrize("durable", [False, True])
def test_round_trip_of_every_length(tmp_path, layout, durable):
    with closing(opened(tmp_path, layout, durable=durable)) as tier:
        for n in sorted({1, 2, layout.chunk_size // 2, layout.chunk_size}):
            chunk = make_chunk(layout, n, n)
            assert put(tier, chunk) is PutOutcome.STORED
            assert tier.has(chunk.record.key)
            assert tier.tokens(chunk.record.key) == chunk.tokens
            for part in {1, n // 2 or 1, n}:
                assert loads(tier, chunk, layout, part)


def test_a_chunk_has_one_value_for_each_layer_group(tmp_path):
    chunk = make_chunk(SMOLLM2)
    with closing(opened(tmp_path, SMOLLM2)) as tier:
        put(tier, chunk)
    with raw(tmp_path, b"values") as (txn, db):
        sizes = [len(value) for _, value in txn.cursor(db)]
    assert sizes == [HEADER_BYTES + SMOLLM2.chunk_bytes // 3] * 3


def test_unknown_keys_are_missing(tier):
    chunk = make_chunk(SMALL)
    assert not tier.has(chunk.record.key)
    assert tier.tokens(chunk.record.key) is None
    assert cause_of(tier, chunk) == "missing"
    tier.drop(chunk.record.key)


def test_a_second_put_replaces_the_first(tier):
    chunk = make_chunk(SMALL)
    put(tier, chunk)
    used = tier.usage().used_bytes
    other = make_chunk(SMALL, 5)
    replacement = replace(chunk, payload=other.payload, kv=other.kv)
    assert put(tier, replacement) is PutOutcome.STORED
    assert loads(tier, replacement)
    assert (tier.usage().used_bytes, tier.usage().chunks) == (used, 1)


def test_traffic_is_counted(tier):
    chunk = make_chunk(SMALL)
    put(tier, chunk)
    loads(tier, chunk)
    assert tier.read_bytes == tier.write_bytes == SMALL.chunk_bytes + HEADER_BYTES
    assert tier.read_seconds > 0
    assert tier.write_seconds > 0


def test_loads_leave_nothing_of_the_file_in_resident_memory(tmp_path):
    chunks = [make_chunk(SMOLLM2, seed) for seed in range(5)]
    with closing(opened(tmp_path, SMOLLM2)) as tier:
        for chunk in chunks:
            put(tier, chunk)
        assert all(loads(tier, chunk, SMOLLM2) for chunk in chunks)
        _, mapping = Path("/proc/self/smaps").read_text().split(f"{tmp_path}/data.mdb\n")
        resident_kib = int(re.search(r"^Rss: +(\d+) kB", mapping, re.MULTILINE)[1])
    assert resident_kib * 1024 < SMOLLM2.chunk_bytes


def test_a_record_of_another_model_is_the_callers_mistake(tier):
    with pytest.raises(ValueError, match="identity"):
        put(tier, make_chunk(SMALL, identity=OTHER_IDENTITY))


# -- verification ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("database", "change", "cause"),
    [
        (b"values", lambda v: v[: len(v) // 2], "length"),
        (b"values", lambda v: v[:100], "length"),
        (b"values", lambda v: b"", "length"),
        (b"values", flip(24), "header"),
        (b"values", flip(3000), "header"),
        (b"values", flip(HEADER_BYTES), "checksum"),
        (b"values", flip(-1), "checksum"),
        (b"values", lambda v: None, "missing"),
        (b"tokens", flip(17), "tokens"),
        (b"tokens", lambda v: v[:-4], "tokens"),
        (b"tokens", lambda v: None, "missing"),
    ],
)
def test_damage_is_found_and_the_next_put_repairs_it(tmp_path, database, change, cause):
    chunk, neighbour = make_chunk(SMOLLM2), make_chunk(SMOLLM2, 1)
    with closing(opened(tmp_path, SMOLLM2)) as tier:
        put(tier, chunk)
        put(tier, neighbour)
    last_group = b"\0\2" if database == b"values" else b""
    tamper(tmp_path, database, chunk.record.key + last_group, change)
    with closing(opened(tmp_path, SMOLLM2)) as tier:
        assert cause_of(tier, chunk, SMOLLM2) == cause
        assert loads(tier, neighbour, SMOLLM2)
        assert put(tier, chunk) is PutOutcome.STORED
        assert loads(tier, chunk, SMOLLM2)


def test_values_that_changed_places_are_found(tmp_path):
    one, two = make_chunk(SMALL, 1), make_chunk(SMALL, 2)
    with closing(opened(tmp_path)) as tier:
        put(tier, one)
        put(tier, two)
    with raw(tmp_path, b"values") as (txn, db):
        txn.put(one.record.key + b"\0\0", txn.get(two.record.key + b"\0\0", db=db), db=db)
    with closing(opened(tmp_path)) as tier:
        assert cause_of(tier, one) == "header"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [({"parent": bytes(16)}, "header"), ({"identity": bytes(32)}, "identity")],
)
def test_another_record_than_the_stored_one_is_refused(tier, changes, cause):
    chunk = make_chunk(SMALL)
    put(tier, chunk)
    assert cause_of(tier, replace(chunk, record=replace(chunk.record, **changes))) == cause


def test_other_token_ids_are_refused(tier):
    chunk = make_chunk(SMALL)
    put(tier, chunk)
    assert cause_of(tier, replace(chunk, tokens=make_chunk(SMALL, 9).tokens)) == "tokens"


def test_chunks_of_another_identity_stay_but_are_never_loaded(tmp_path):
    theirs, ours = make_chunk(SMALL, identity=OTHER_IDENTITY), make_chunk(SMALL)
    with closing(opened(tmp_path, identity=OTHER_IDENTITY, identity_parts={"weights": "a"})) as tier:
        put(tier, theirs)
    with closing(opened(tmp_path, identity_parts={"weights": "b"})) as tier:
        assert tier.usage().chunks == 1
        assert tier.usage().used_bytes == tier.stored_bytes(SMALL.chunk_size)
        assert tier.identities() == {OTHER_IDENTITY: {"weights": "a"}, IDENTITY: {"weights": "b"}}
        assert cause_of(tier, theirs) == "identity"
        assert put(tier, ours) is PutOutcome.STORED
        tier.drop(theirs.record.key)
        assert [record for record, _, _ in tier.records()] == [ours.record]
    with closing(opened(tmp_path)) as tier:
        assert list(tier.identities()) == [IDENTITY]


def test_what_lmdb_cannot_read_is_an_io_error(tier):
    chunk = make_chunk(SMALL)
    put(tier, chunk)
    tier._env._env.close()
    assert cause_of(tier, chunk) == "io"
    assert tier.tokens(chunk.record.key) is None


# -- capacity ----------------------------------------------------------------------------------------------------


def test_the_cap_holds_and_counts_what_was_there_before(tmp_path):
    chunks = [make_chunk(SMALL, seed) for seed in range(6)]
    with closing(opened(tmp_path)) as tier:
        size = tier.stored_bytes(SMALL.chunk_size)
        assert [put(tier, chunk) for chunk in chunks[:3]] == [PutOutcome.STORED] * 3
    cap = 4 * size + size // 2
    with closing(opened(tmp_path, capacity=cap)) as tier:
        assert tier.usage().used_bytes == 3 * size
        assert [put(tier, chunk) for chunk in chunks[3:]] == [PutOutcome.STORED] + [PutOutcome.FULL] * 2
        assert put(tier, chunks[0]) is PutOutcome.STORED  # replacing takes no more room
        tier.drop_many([chunks[0].record.key, chunks[1].record.key, b"unknown"])
        assert tier.usage().used_bytes == 2 * size
        assert put(tier, chunks[5]) is PutOutcome.STORED
        assert loads(tier, chunks[5])
        assert cause_of(tier, chunks[0]) == "missing"
        assert tier.usage().used_bytes <= cap


def test_stored_bytes_are_header_and_payload_in_whole_pages(tier):
    assert tier.stored_bytes(SMALL.chunk_size) == 4096 + -(-SMALL.chunk_bytes // 4096) * 4096
    assert tier.stored_bytes(1) == 4096 + 4096


def test_a_chunk_larger_than_the_tier_is_oversize(tmp_path):
    with closing(opened(tmp_path, capacity=SMALL.chunk_bytes)) as tier:
        assert put(tier, make_chunk(SMALL)) is PutOutcome.OVERSIZE
        assert tier.usage().used_bytes == 0


def test_the_file_stays_in_bounds_when_everything_is_replaced_many_times(tmp_path):
    cap = 8 * 1024 * 1024
    with closing(opened(tmp_path, capacity=cap)) as tier:
        stored: list[bytes] = []
        for seed in range(1200):
            chunk = make_chunk(SMALL, seed, n_tokens=1 + seed * 7 % SMALL.chunk_size)
            while put(tier, chunk) is PutOutcome.FULL:
                tier.drop(stored.pop(seed % len(stored)))
            stored.append(chunk.record.key)
        assert tier.usage().used_bytes <= cap
        assert not tier.usage().read_only
    assert (tmp_path / "data.mdb").stat().st_size <= cap + 16 * 1024 * 1024


def test_clear_gives_the_space_back(tier):
    path = tier._env.directory / "data.mdb"
    for seed in range(50):
        put(tier, make_chunk(SMALL, seed))
    before = path.stat().st_size
    tier.clear()
    assert path.stat().st_size < before / 4
    assert (tier.usage().used_bytes, tier.usage().chunks) == (0, 0)
    assert list(tier.records()) == []
    chunk = make_chunk(SMALL)
    assert put(tier, chunk) is PutOutcome.STORED
    assert loads(tier, chunk)


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


def test_records_hold_no_transaction_open(tier):
    put(tier, make_chunk(SMALL, 1))
    records = tier.records()
    tier.clear()  # would wait for ever
    assert len(list(records)) == 1


WRITER = """
import sys
from tests.kvstore.test_disk_tier import *
tier = opened(Path(sys.argv[1]))
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
    script = "import sys; from tests.kvstore.test_disk_tier import *; opened(Path(sys.argv[1]))"
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


# -- threads -----------------------------------------------------------------------------------------------------


def test_many_threads_never_see_a_wrong_byte(tier):
    chunks = [make_chunk(SMALL, seed) for seed in range(8)]
    hits = threading.Semaphore(0)

    def work(seed: int) -> None:
        for i in range(60):
            chunk = chunks[(seed + i) % len(chunks)]
            assert put(tier, chunk) is PutOutcome.STORED
            if i % 3 == 0:
                tier.drop(chunks[(seed + 5 * i) % len(chunks)].record.key)
            if i % 20 == 19:
                tier.clear()
            try:
                assert loads(tier, chunk)
            except IntegrityError as error:
                if error.cause not in ("missing", "io"):  # dropped, or being cleared
                    raise
            else:
                hits.release()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert hits.acquire(blocking=False)
    assert tier.usage().used_bytes == sum(size for _, _, size in tier.records())


def test_closing_waits_for_readers_and_can_be_repeated(tmp_path):
    tier = opened(tmp_path)
    chunk = make_chunk(SMALL)
    put(tier, chunk)
    with ThreadPoolExecutor(1) as pool:
        with tier._env.read() as txn:
            value = txn.get(chunk.record.key, db=tier._env.db(b"tokens"))
            closing_now = pool.submit(tier.close)
            with pytest.raises(TimeoutError):
                closing_now.result(0.2)
            assert bytes(value) == chunk.tokens
        closing_now.result()
    tier.close()
    assert cause_of(tier, chunk) == "io"
    assert put(tier, chunk) is PutOutcome.READ_ONLY
