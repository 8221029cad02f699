from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.chunk import HEADER_BYTES
from kvstore.tiers.base import IntegrityError, PutOutcome
from kvstore.tiers.disk import DiskTier
from tests.kvstore.chunks import IDENTITY, ODD, SMALL, SMOLLM2, make_chunk
from tests.kvstore.disk import OTHER_IDENTITY, cause_of, flip, loads, opened, put, raw, tamper


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with closing(opened(tmp_path / "store")) as made:
        yield made


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


def test_records_hold_no_transaction_open(tier):
    put(tier, make_chunk(SMALL, 1))
    records = tier.records()
    tier.clear()  # would wait for ever
    assert len(list(records)) == 1


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


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system doesn't tell what is resident")
def test_neither_loads_nor_deletions_leave_the_file_in_resident_memory(tmp_path):
    chunks = [make_chunk(SMOLLM2, seed=n) for n in range(8)]
    with closing(opened(tmp_path, SMOLLM2)) as tier:
        for chunk in chunks:
            put(tier, chunk)
        assert loads(tier, chunks[0], SMOLLM2)
        after_load = resident_bytes(tmp_path / "data.mdb")
        tier.drop_many([chunk.record.key for chunk in chunks[1:]])
        assert after_load <= 512 * 1024 < SMOLLM2.chunk_bytes
        assert resident_bytes(tmp_path / "data.mdb") <= 64 * 1024
        assert loads(tier, chunks[0], SMOLLM2)


def resident_bytes(file: Path) -> int:
    """Of this process's map of a file; see proc_pid_smaps(5)."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found
