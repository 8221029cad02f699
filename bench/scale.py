"""What grows with what: prefix length, number of stored chunks, streams.

    python -m bench.scale [--sections prefix chunks streams] [--json FILE] [--plot FILE]

*prefix*: time to the first token cold and on a device hit, and time per token, by prompt length. *chunks*: looking a
prefix up, taking and giving back a lease, and publishing a new prefix into a tree of so many chunks, 16 chunks each
time (times must not grow with the tree), and memory a chunk. *streams*: a step over one shared 6k prefix and over as
many prompts of 512 tokens; the first must grow by what is distinct, not with streams x prefix. Speculation is off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.common import document, dtype_name, machine_line, median
from bench.inprocess import ask, chat, make_engine, rate
from bench.restart import CHUNK, IDENTITY, layout
from gateway.engine.engine import Engine
from kvstore import DeviceArena, PrefixStore

SECTIONS = ("prefix", "chunks", "streams")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8000])
    parser.add_argument("--chunks", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--plot", type=Path, help="draw them to this file (needs the extra `plot`)")
    args = parser.parse_args()
    print(f"{machine_line()}\nSmolLM2-135M-Instruct, {dtype_name()}; medians of {args.rounds} rounds")
    figures: dict[str, list[dict[str, float]]] = {}
    if "chunks" in args.sections:
        figures["chunks"] = [stored_chunks(count, args.rounds) for count in args.chunks]
        show("chunks", figures["chunks"])
    if "prefix" in args.sections or "streams" in args.sections:
        asyncio.run(with_engine(args, figures))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine_line(), **figures}, indent=1))
    if args.plot:
        from bench.plots import plot_scale

        plot_scale(figures, machine_line(), args.plot)


async def with_engine(args: argparse.Namespace, figures: dict[str, list[dict[str, float]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        one = make_engine(Path(folder), cache={"tiering": ["gpu"], "device_cache_gb": 1.0}, speculation=False)
        await one.start()
        try:
            await ask(one, chat(one, document(7, 60), "Say hello."), 8)
            if "prefix" in args.sections:
                figures["prefix"] = [await prefix_length(one, length, args.rounds) for length in args.lengths]
                show("prefix", figures["prefix"])
            if "streams" in args.sections:
                figures["streams"] = [await stream_count(one, n, args.rounds) for n in args.streams]
                show("streams", figures["streams"])
        finally:
            await one.close()


async def prefix_length(one: Engine, length: int, rounds: int) -> dict[str, float]:
    cold, hit, gap = [], [], []
    for number in range(rounds):
        ids = chat(one, document(number, 400), "Which team keeps the pump?")[:length]
        cold.append((await ask(one, ids, 1, f"{length}-{number}")).ttft_s)
        warm = await ask(one, [*ids[:-1], 260], 32, f"{length}-{number}")
        assert warm.cached == length - 1
        hit.append(warm.ttft_s)
        gap.append(warm.tpot_s)
    return {
        "tokens": length,
        "cold TTFT, s": median(cold),
        "cold, ms a token": median(cold) / length * 1e3,
        "hit TTFT, ms": median(hit) * 1e3,
        "TPOT, ms": median(gap) * 1e3,
    }


def stored_chunks(count: int, rounds: int) -> dict[str, float]:
    """Conversations of 16 chunks in a tree on the device tier alone: what is measured is the tree and the policy."""
    shape = layout(head_dim=8)
    before = psutil.Process().memory_info().rss
    store = PrefixStore(shape, IDENTITY, DeviceArena(shape, count + 64, torch.device("cpu")))
    depth = 16
    for number in range(max(1, count // depth)):
        publish(store, conversation(number, depth))
    grown = psutil.Process().memory_info().rss - before - (count + 64) * shape.chunk_bytes
    lookups, leases, publishes = [], [], []
    steps = 50 * rounds
    for step in range(steps):
        known = conversation(step * 7919 % max(1, count // depth), depth)
        started = time.perf_counter()
        store.match(known)
        lookups.append(time.perf_counter() - started)
        started = time.perf_counter()
        lease = store.begin([*known, 1])
        store.load(lease)
        store.release(lease)
        leases.append(time.perf_counter() - started)
        new = conversation(10_000_000 + step, depth)  # pushes the least worthy out: the arena is full
        started = time.perf_counter()
        publish(store, new)
        publishes.append(time.perf_counter() - started)
    store.close()
    return {
        "chunks": count,
        "lookup, us": median(lookups) * 1e6,
        "begin + load + release, us": median(leases) * 1e6,
        "publish with eviction, us": median(publishes) * 1e6,
        "memory a chunk beside its KV, bytes": max(0, grown) / count,
    }


def conversation(number: int, depth: int) -> list[int]:
    return [number, *range(1, CHUNK * depth)]


def publish(store: PrefixStore, tokens: list[int]) -> None:
    lease = store.begin(tokens)
    store.load(lease)
    assert store.reserve(lease, len(tokens))
    store.publish(lease, tokens, len(tokens))
    store.release(lease)


async def stream_count(one: Engine, n: int, rounds: int) -> dict[str, float]:
    trunk = document(50, 277)
    shared = [chat(one, trunk, f"Question {i}: which team?") for i in range(n)]
    own = [chat(one, document(60 + i, 22), "Which team?") for i in range(n)]
    rates: dict[str, list[float]] = {"shared": [], "own": []}
    for prompts in (shared, own):
        await asyncio.gather(*(ask(one, ids, 1) for ids in prompts))
    for _ in range(rounds):
        for name, prompts in (("shared", shared), ("own", own)):
            rates[name].append(await rate(one, [(ids, {}) for ids in prompts], 32))
    over_shared, over_own = median(rates["shared"]), median(rates["own"])
    return {
        "streams": n,
        "one 6k prefix, tokens/s": over_shared,
        "one 6k prefix, ms a step": n / over_shared * 1e3,
        "512 tokens each, tokens/s": over_own,
        "512 tokens each, ms a step": n / over_own * 1e3,
    }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n**{title}**\n\n| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in row.values()) + " |")


if __name__ == "__main__":
    main()
