"""Restart: time until the prefix tree is rebuilt, by number and size of chunks; and the size of the file after churn.

    .venv/bin/python -m bench.restart [--chunks 1000 10000 100000]

Synthetic small chunks, each a value of its own in LMDB. The index is rebuilt from metadata alone, so the time must not
depend on the payload: the second table shows it with chunks of other sizes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

from bench.common import machine_line, median
from kvstore import DeviceArena, DiskTier, KVLayout, PrefixStore
from kvstore.keys import chunk_key, encode_tokens, root_key
from kvstore.tiers.base import ChunkRecord, ChunkStats, PutOutcome

IDENTITY = b"bench".ljust(32, b"\0")
CHUNK = 16


def layout(head_dim: int) -> KVLayout:
    return KVLayout(layers=1, kv_heads=1, head_dim=head_dim, dtype=torch.float16, chunk_size=CHUNK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    args = parser.parse_args()
    print(machine_line())
    print(f"{'chunks':>8} {'payload bytes':>14} {'file MiB':>9} {'index s':>8}")
    for count in args.chunks:
        restart(count, head_dim=8)
    for head_dim in (64, 512):
        restart(10_000, head_dim=head_dim)
    churn()


def restart(count: int, head_dim: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shape = layout(head_dim)
        fill(Path(folder), shape, count)
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            store = opened(Path(folder), shape)
            seconds.append(time.perf_counter() - started)
            assert store.stats().usage["disk"].chunks == count  # type: ignore[index]
            store.close()
        print(f"{count:8} {shape.chunk_bytes:14} {file_mib(Path(folder)):9.0f} {median(seconds):8.3f}", flush=True)


def fill(folder: Path, shape: KVLayout, count: int) -> None:
    """Conversations of 16 chunks each."""
    disk = DiskTier(shape, folder, 1 << 36, identity=IDENTITY, min_free_bytes=0)
    payload = torch.zeros(shape.chunk_bytes, dtype=torch.uint8)
    root = root_key(IDENTITY, "")
    parent = root
    for number in range(count):
        depth = number % 16
        parent = root if depth == 0 else parent
        tokens = encode_tokens([number, *range(CHUNK - 1)])
        key = chunk_key(parent, tokens)
        record = ChunkRecord(key=key, parent=parent, identity=IDENTITY, n_tokens=CHUNK, depth=depth)
        assert disk.put(record, tokens, payload, ChunkStats(1, float(number), float(number), 0.5)) is PutOutcome.STORED
        parent = key
    disk.close()


def opened(folder: Path, shape: KVLayout, capacity: int = 1 << 36) -> PrefixStore:
    disk = DiskTier(shape, folder, capacity, identity=IDENTITY, min_free_bytes=0)
    return PrefixStore(shape, IDENTITY, DeviceArena(shape, 4, torch.device("cpu")), disk=disk)


def churn() -> None:
    """Store three times the capacity through the store itself, whole chunks and tails of all lengths."""
    shape = KVLayout(layers=30, kv_heads=3, head_dim=64, dtype=torch.bfloat16, chunk_size=64)
    capacity = 256 * 2**20
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskTier(shape, Path(folder), capacity, identity=IDENTITY, min_free_bytes=0)
        store = PrefixStore(shape, IDENTITY, DeviceArena(shape, 32, torch.device("cpu")), disk=disk)
        written = number = 0
        while written < 3 * capacity:
            tokens = [number, *range(1, 200 + (number * 37) % 300)]
            lease = store.begin(tokens)
            store.load(lease)
            if store.reserve(lease, len(tokens)):
                store.publish(lease, tokens, len(tokens), final=True)
            store.release(lease)
            store.flush()
            written = store.stats().disk_write_bytes
            number += 1
        live = store.stats().usage["disk"].used_bytes  # type: ignore[index]
        store.close()
        size = os.stat(Path(folder) / "data.mdb").st_blocks * 512
        print(
            f"\nafter {written / capacity:.1f} × the cap of {capacity / 2**20:.0f} MiB: live {live / 2**20:.0f} MiB, "
            f"file {size / 2**20:.0f} MiB, file / live {size / live:.2f}, file / cap {size / capacity:.2f}"
        )


def file_mib(folder: Path) -> float:
    return os.stat(folder / "data.mdb").st_blocks * 512 / 2**20


if __name__ == "__main__":
    main()
