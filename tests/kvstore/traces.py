"""A small synthetic trace: conversations that grow turn by turn, over a few system prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path

from kvstore.replay import Trace

BLOCK = 16


def conversations(seed: int, n_requests: int, *, partial: bool = True) -> Trace:
    """Block ids are handed out as prompts grow; without ``partial`` every prompt ends with a whole block."""
    rng = random.Random(seed)
    trace, fresh, at = Trace(f"synthetic-{seed}", BLOCK), iter(range(1, 10**9)), 0.0
    running: list[list[int]] = []
    prompts = [[next(fresh) for _ in range(rng.randint(1, 4))] for _ in range(3)]
    for _ in range(n_requests):
        at += rng.expovariate(1.0)
        if running and rng.random() < 0.6:
            blocks = running.pop(rng.randrange(len(running)))
        else:
            blocks = list(rng.choice(prompts))
        blocks = blocks + [next(fresh) for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.7:
            running.append(blocks[:-1] if partial else blocks)
        trace.append(at, len(blocks) * BLOCK - (rng.randint(1, BLOCK - 1) if partial else 0), blocks)
    return trace


def write(trace: Trace, path: Path) -> Path:
    rows = [
        {"timestamp": round(at * 1000), "input_length": n_tokens, "output_length": 1, "hash_ids": list(blocks)}
        for at, n_tokens, blocks in trace
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
