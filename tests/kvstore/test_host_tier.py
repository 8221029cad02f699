from __future__ import annotations

import ctypes
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from kvstore.tiers.base import ChunkStats, IntegrityError, PutOutcome, Tier
from kvstore.tiers.host import HostTier
from tests.kvstore.chunks import ODD, SMALL, SMOLLM2, Chunk, arena_target, make_chunk


def tier_of(chunks: int, layout=SMALL) -> HostTier:
    slab = -(-layout.chunk_bytes // 4096) * 4096
    return HostTier(layout, chunks * slab + 100)


def put(tier: Tier, chunk: Chunk) -> PutOutcome:
    return tier.put(chunk.record, chunk.tokens, chunk.payload, ChunkStats())


def cause_of(tier: Tier, chunk: Chunk) -> str:
    n = chunk.record.n_tokens
    with pytest.raises(IntegrityError) as caught:
        tier.get_into(chunk.record, chunk.tokens, arena_target(SMALL, n), n)
    return caught.value.cause


@pytest.mark.parametrize("layout", [SMALL, ODD, SMOLLM2], ids=["bf16", "fp32", "smollm2"])
def test_round_trip_of_every_length(layout):
    tier = tier_of(2, layout)
    for n in sorted({1, 2, layout.chunk_size // 2, layout.chunk_size}):
        chunk = make_chunk(layout, n, n)
        assert put(tier, chunk) is PutOutcome.STORED
        for part in sorted({1, n // 2 or 1, n}):
            target = arena_target(layout, part)
            tier.get_into(chunk.record, chunk.tokens, target, part)
            assert torch.equal(target, chunk.kv[:, :, :, :part])
        tier.drop(chunk.record.key)


def test_the_payload_is_copied():
    tier, chunk = tier_of(1), make_chunk(SMALL)
    put(tier, chunk)
    kept = chunk.kv.clone()
    chunk.payload.zero_()
    target = arena_target(SMALL, 32)
    tier.get_into(chunk.record, chunk.tokens, target, 32)
    assert torch.equal(target, kept)


def test_the_cap_holds_and_a_drop_makes_room():
    tier = tier_of(3)
    chunks = [make_chunk(SMALL, seed) for seed in range(4)]
    assert [put(tier, chunk) for chunk in chunks] == [PutOutcome.STORED] * 3 + [PutOutcome.FULL]
    usage = tier.usage()
    assert usage.chunks == 3
    assert usage.used_bytes <= usage.capacity_bytes
    assert not tier.has(chunks[3].record.key)
    tier.drop(chunks[0].record.key)
    tier.drop(b"unknown")
    assert put(tier, chunks[3]) is PutOutcome.STORED
    assert not tier.has(chunks[0].record.key)
    assert cause_of(tier, chunks[0]) == "missing"


def test_a_full_tier_can_replace_what_it_has():
    tier, chunk = tier_of(1), make_chunk(SMALL)
    put(tier, chunk)
    other = replace(chunk, payload=make_chunk(SMALL, 5).payload)
    assert put(tier, other) is PutOutcome.STORED
    target = arena_target(SMALL, 32)
    tier.get_into(chunk.record, chunk.tokens, target, 32)
    assert torch.equal(target, make_chunk(SMALL, 5).kv)
    assert tier.usage().chunks == 1


def test_a_chunk_larger_than_the_tier_is_oversize():
    assert put(HostTier(SMALL, SMALL.chunk_bytes - 1), make_chunk(SMALL)) is PutOutcome.OVERSIZE
    assert put(HostTier(SMALL, 0), make_chunk(SMALL)) is PutOutcome.OVERSIZE


def test_what_does_not_verify_is_refused_and_the_next_put_repairs():
    tier, chunk = tier_of(2), make_chunk(SMALL)
    put(tier, chunk)
    assert cause_of(tier, replace(chunk, record=replace(chunk.record, identity=bytes(32)))) == "identity"
    assert cause_of(tier, replace(chunk, record=replace(chunk.record, parent=bytes(16)))) == "header"
    assert cause_of(tier, replace(chunk, tokens=make_chunk(SMALL, 9).tokens)) == "tokens"
    tier._entries[chunk.record.key].memory[1234] ^= 1
    assert cause_of(tier, chunk) == "checksum"
    assert put(tier, chunk) is PutOutcome.STORED
    tier.get_into(chunk.record, chunk.tokens, arena_target(SMALL, 32), 32)


def resident_bytes(tier: HostTier) -> int:
    pages = -(-tier._region.numel() // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * pages)()
    address = ctypes.c_void_p(tier._region.data_ptr())
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(pages * mmap.PAGESIZE), resident) == 0
    return sum(flag & 1 for flag in resident) * mmap.PAGESIZE


def test_prefault_makes_all_memory_resident_and_keeps_what_is_stored():
    tier, chunk = tier_of(5, SMOLLM2), make_chunk(SMOLLM2)
    put(tier, chunk)
    assert resident_bytes(tier) < 3 * SMOLLM2.chunk_bytes
    tier.prefault()
    assert resident_bytes(tier) == tier._region.numel()
    target = arena_target(SMOLLM2, 256)
    tier.get_into(chunk.record, chunk.tokens, target, 256)
    assert torch.equal(target, chunk.kv)
    assert [put(tier, make_chunk(SMOLLM2, seed)) for seed in range(1, 5)] == [PutOutcome.STORED] * 4


def test_a_slab_that_is_read_is_not_reused_before_the_reader_left():
    tier, chunk, other = tier_of(1), make_chunk(SMALL), make_chunk(SMALL, 1)
    put(tier, chunk)
    with tier._reading(chunk.record.key):
        tier.drop(chunk.record.key)
        assert not tier.has(chunk.record.key)
        assert put(tier, other) is PutOutcome.FULL
        assert tier.usage().used_bytes > 0
    assert tier.usage().used_bytes == 0
    assert put(tier, other) is PutOutcome.STORED


def test_many_threads_never_see_a_wrong_byte():
    tier = tier_of(4)
    chunks = [make_chunk(SMALL, seed) for seed in range(8)]
    hits = threading.Semaphore(0)

    def work(seed: int) -> None:
        for i in range(150):
            chunk = chunks[(seed + i) % len(chunks)]
            if put(tier, chunk) is PutOutcome.FULL:
                tier.drop(chunks[(seed + 3 * i) % len(chunks)].record.key)
            target = arena_target(SMALL, 32)
            try:
                tier.get_into(chunk.record, chunk.tokens, target, 32)
            except IntegrityError as error:
                if error.cause != "missing":
                    raise
            else:
                assert torch.equal(target, chunk.kv)
                hits.release()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert hits.acquire(blocking=False)
    for chunk in chunks:
        tier.drop(chunk.record.key)
    assert tier.usage().used_bytes == 0


def test_a_closed_tier_holds_nothing():
    tier, chunk = tier_of(2), make_chunk(SMALL)
    put(tier, chunk)
    tier.close()
    assert not tier.has(chunk.record.key)
    assert put(tier, chunk) is PutOutcome.OVERSIZE
    assert tier.usage().used_bytes == 0
