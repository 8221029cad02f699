"""Speed of the lower tiers, in GB/s of payload, beside a memcpy of the same bytes in the same run.

    python -m bench.store [--chunks 16] [--rounds 9] [--directory DIR]

Every row is the median over interleaved rounds, so that a noisy neighbour hits all rows alike. The layout is
SmolLM2-135M's (30 layers, 3 KV heads of 64, bf16, 256 tokens a chunk); loads go to a strided arena as in the engine.
"disk get" reads what was written a moment ago from the page cache. "cold" comes after the file was dropped from the
page cache, and "again" reads once more what a cold read brought back, in smaller pieces than a write leaves there.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
import xxhash

from bench.common import machine_line, median
from kvstore.keys import chunk_key, encode_tokens, root_key
from kvstore.layout import KVLayout
from kvstore.tiers.base import ChunkRecord, ChunkStats, PutOutcome, Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier

LAYOUT = KVLayout(layers=30, kv_heads=3, head_dim=64, dtype=torch.bfloat16, chunk_size=256)
IDENTITY = bytes(32)


class Workload:
    """Full chunks with random bytes, and an arena with room for all of them."""

    def __init__(self, chunks: int) -> None:
        rng = np.random.default_rng(0)
        parent = root_key(IDENTITY, "")
        self.records: list[ChunkRecord] = []
        self.tokens: list[bytes] = []
        for depth in range(chunks):
            tokens = encode_tokens(rng.integers(0, 49_000, LAYOUT.chunk_size))
            key = chunk_key(parent, tokens)
            self.records.append(ChunkRecord(key, parent, IDENTITY, LAYOUT.chunk_size, depth))
            self.tokens.append(tokens)
            parent = key
        self.payloads = torch.from_numpy(rng.integers(0, 256, (chunks, LAYOUT.chunk_bytes), dtype=np.uint8))
        slots = chunks * LAYOUT.chunk_size
        self.arena = torch.zeros(LAYOUT.layers, 2, LAYOUT.kv_heads, slots, LAYOUT.head_dim, dtype=LAYOUT.dtype)
        self.flat = np.zeros_like(self.payloads.numpy())

    def memcpy(self) -> None:
        for source, target in zip(self.payloads.numpy(), self.flat, strict=True):
            np.copyto(target, source)

    def checksum(self) -> None:
        for payload in self.payloads.numpy():
            xxhash.xxh3_64_intdigest(payload.data)

    def put(self, tier: Tier) -> None:
        for record, tokens, payload in zip(self.records, self.tokens, self.payloads, strict=True):
            if tier.put(record, tokens, payload, ChunkStats()) is not PutOutcome.STORED:
                raise SystemExit(f"the {tier.name} tier could not store: {tier.usage()}")

    def get(self, tier: Tier) -> None:
        for record, tokens in zip(self.records, self.tokens, strict=True):
            lo = record.depth * LAYOUT.chunk_size
            tier.get_into(record, tokens, self.arena[:, :, :, lo : lo + LAYOUT.chunk_size], LAYOUT.chunk_size)


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def drop_page_cache(file: Path) -> None:
    """Write the file back and ask the system to forget it; pages that somebody maps may stay."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def measure(chunks: int, rounds: int, directory: Path) -> dict[str, float]:
    """Median seconds a row."""
    load = Workload(chunks)
    room = 2 * chunks * LAYOUT.chunk_bytes
    taken: dict[str, list[float]] = {}
    with (
        closing(HostTier(LAYOUT, room)) as host,
        closing(DiskTier(LAYOUT, directory, room, identity=IDENTITY)) as disk,
    ):
        host.prefault()
        rows: dict[str, Callable[[], None]] = {
            "memcpy": load.memcpy,
            "checksum": load.checksum,
            "host put": lambda: load.put(host),
            "host get": lambda: load.get(host),
            "disk put": lambda: load.put(disk),
            "disk get": lambda: load.get(disk),
        }
        for _ in range(rounds + 1):
            for name, work in rows.items():
                taken.setdefault(name, []).append(seconds(work))
        for _ in range(rounds + 1):
            drop_page_cache(directory / "data.mdb")
            for name in ("disk get, cold", "disk get, again"):
                taken.setdefault(name, []).append(seconds(rows["disk get"]))
    return {name: median(times[1:]) for name, times in taken.items()}  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, help="where the store is made (default: the temporary folder)")
    options = parser.parse_args()
    total = options.chunks * LAYOUT.chunk_bytes
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        medians = measure(options.chunks, options.rounds, Path(folder))
    print(machine_line())
    print(f"{options.chunks} chunks of {LAYOUT.chunk_bytes / 2**20:.1f} MiB, median of {options.rounds} rounds\n")
    print(f"{'':16}{'GB/s':>8}{'of memcpy':>12}{'ms a chunk':>12}")
    for name, took in medians.items():
        share = medians["memcpy"] / took
        print(f"{name:16}{total / took / 1e9:8.2f}{share:12.0%}{took / options.chunks * 1e3:12.3f}")
    for name in ("host get", "disk get"):
        print(f"verification is {medians['checksum'] / medians[name]:.0%} of a {name}")


if __name__ == "__main__":
    main()
