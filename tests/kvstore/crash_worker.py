"""A process that stores prompts until it is killed: ``python -m tests.kvstore.crash_worker FOLDER SEED``.

Prints ``stored SEED`` once a prompt is wholly on disk. The KV of each token is made from its prefix, so that whoever
reads it back can tell whether it is right.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

from kvstore import DeviceArena, DiskTier, HostTier, KVLayout, PrefixStore

CHUNK = 16
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, dtype=torch.float32, chunk_size=CHUNK)
IDENTITY = b"crash-test".ljust(32, b"\0")
DISK_BYTES = 600_000


def open_store(folder: Path) -> PrefixStore:
    disk = DiskTier(LAYOUT, folder, DISK_BYTES, identity=IDENTITY, min_free_bytes=0)
    return PrefixStore(
        LAYOUT,
        IDENTITY,
        DeviceArena(LAYOUT, 16, torch.device("cpu")),
        host=HostTier(LAYOUT, 1 << 17),
        disk=disk,
        policy="lru",  # so that a test can say which prompts must still be there
    )


def prompt(seed: int) -> list[int]:
    """30–120 tokens; every fourth begins like the one before it."""
    choose = random.Random(seed)
    head = prompt(seed - 1)[:40] if seed % 4 == 3 else []
    return [*head, *(choose.randrange(1000) for _ in range(choose.randrange(30, 80)))]


def kv(tokens: list[int]) -> torch.Tensor:
    """``[layers, 2, kv_heads, n, head_dim]``; row i depends on the first i + 1 tokens."""
    running = torch.tensor(tokens, dtype=torch.float64).cumsum(0)
    scale = torch.arange(1, LAYOUT.layers * 2 * LAYOUT.kv_heads * LAYOUT.head_dim + 1, dtype=torch.float64)
    rows = torch.sin(running[:, None] * 0.37 + scale[None, :] * 1.7).float()
    return rows.view(-1, LAYOUT.layers, 2, LAYOUT.kv_heads, LAYOUT.head_dim).permute(1, 2, 3, 0, 4)


def serve(store: PrefixStore, tokens: list[int]) -> int:
    """One request; returns its hit tokens, and fails when one of them is wrong."""
    lease = store.begin(tokens)
    try:
        store.load(lease)
        wanted = kv(tokens)
        pages = [store._arena.page_view(page, CHUNK) for page in lease.pages]
        for at in range(lease.hit_tokens):
            assert torch.equal(pages[at // CHUNK][:, :, :, at % CHUNK], wanted[:, :, :, at]), f"wrong KV at {at}"
        if store.reserve(lease, len(tokens)):
            for at in range(lease.hit_tokens, len(tokens)):
                page = store._arena.page_view(lease.pages[at // CHUNK], CHUNK)
                page[:, :, :, at % CHUNK] = wanted[:, :, :, at]
            store.publish(lease, tokens, len(tokens), final=True)
        return lease.hit_tokens
    finally:
        store.release(lease)


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    store = open_store(folder)
    print("open", flush=True)
    while True:
        serve(store, prompt(seed))
        store.flush()
        print(f"stored {seed}", flush=True)
        seed += 1


if __name__ == "__main__":
    main()
