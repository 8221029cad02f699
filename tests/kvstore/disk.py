"""The disk tier's tests share these: opening, storing, loading, and damaging a store behind its back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest
import torch

from kvstore.layout import KVLayout
from kvstore.tiers.base import ChunkStats, IntegrityError, PutOutcome, Tier
from kvstore.tiers.disk import DiskTier
from tests.kvstore.chunks import IDENTITY, SMALL, Chunk, arena_target

CAP = 64 * 1024 * 1024
OTHER_IDENTITY = bytes(reversed(IDENTITY))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(path: str | Path, layout: KVLayout = SMALL, capacity: int = CAP, **settings) -> DiskTier:
    settings.setdefault("identity", IDENTITY)
    settings.setdefault("min_free_bytes", 0)
    return DiskTier(layout, path, capacity, **settings)


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
