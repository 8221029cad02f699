"""Correctness and speed on a GPU in one go: run it wherever CUDA is found.

    python -m bench.gpu_check [--model NAME] [--json FILE]      # ends at once, with 0, where there is no CUDA device
    python -m bench.gpu_check --device cpu                      # the same checks on the CPU path, to check the checks

Checks, each a line ``ok`` or ``FAILED``; the exit status is the number of failures:

* a hit answers as a cold run, for prompt lengths around chunk edges, alone and in a batch, greedy and seeded;
* from each tier: the arena, host memory, disk, and disk after a restart, each shown by where the tokens came from;
* time to the first token cold and hit by tier, time per token, tokens a second over a shared prefix;
* memory: after a first pass over more prefixes than the arena holds, nothing grows, and on CUDA all of it stays under
  ``gpu_memory_utilization``;
* out of memory in a step ends those requests with an error, and the next request is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.common import document, machine_line, median
from bench.inprocess import Answer, ask, chat, make_engine, rate
from gateway.engine.engine import Engine
from gateway.engine.types import EngineError
from kvstore.tiers.base import TierName

CHUNK = 256


class Report:
    def __init__(self) -> None:
        self.failures = 0
        self.figures: dict[str, float | str] = {}

    def check(self, good: bool, what: str, detail: str = "") -> None:
        self.failures += not good
        print(f"{'ok    ' if good else 'FAILED'}  {what}{': ' + detail if detail else ''}", flush=True)

    def figure(self, name: str, value: float, unit: str) -> None:
        self.figures[f"{name}, {unit}"] = value
        print(f"        {name}: {value:.4g} {unit}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--utilization", type=float, help="CUDA: gpu_memory_utilization; default: a small arena")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked (--device cpu runs the same checks on the CPU path)")
        return
    if args.device == "cpu" and torch.cuda.is_available():
        sys.exit("the engine takes the GPU where there is one; run with CUDA_VISIBLE_DEVICES= to check the CPU path")
    report = Report()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU path"
    print(f"{name}; {machine_line()}; torch {torch.__version__}; model {args.model}\n")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check_all(Path(folder), args, report))
    print(f"\n{report.failures} failed" if report.failures else "\nall checks passed")
    if args.json:
        args.json.write_text(json.dumps({"device": name, "machine": machine_line(), **report.figures}, indent=1))
    sys.exit(report.failures)


def build(folder: Path, args: argparse.Namespace, *, exact: bool = False) -> Engine:
    """``exact`` is fp32, in which a hit and a cold run may not differ in a single token; else what is served."""
    return make_engine(
        folder,
        model={
            "name": args.model,
            "dtype": "float32" if exact else "bfloat16",
            "max_model_len": 4096,
            "gpu_memory_utilization": args.utilization or small_utilization(),
        },
        cache={"chunk_size": CHUNK, "device_cache_gb": 0.5 if exact else 0.3, "cpu_cache_gb": 0.6, "disk_cache_gb": 2},
    )


def small_utilization() -> float:
    """So much that the demo model and an arena of about 1 GiB fit: a small arena is soon full."""
    if not torch.cuda.is_available():
        return 0.85
    free, total = torch.cuda.mem_get_info()
    return min(0.9, (total - free + 1.5 * 2**30) / total)


async def check_all(folder: Path, args: argparse.Namespace, report: Report) -> None:
    one = build(folder / "exact", args, exact=True)
    await one.start()
    try:
        await hits_equal_cold(one, report)
    finally:
        await one.close()
    one = build(folder / "served", args)
    await one.start()
    try:
        prompt = await tiers(one, report)
        await speed(one, report)
        await out_of_memory(one, report)
        await memory(one, args, report)
        await ask(one, prompt, 1)
        assert one.cache is not None
        await asyncio.to_thread(one.cache.flush, 30)
    finally:
        await one.close()
    one = build(folder / "served", args)
    await one.start()
    try:
        again = await ask(one, [*prompt[:-1], 260], 8)
        report.check(again.tiers["disk"] > 0, "disk hit after a restart", where(again))
        report.figure("TTFT, disk hit after a restart", again.ttft_s * 1e3, "ms")
    finally:
        await one.close()


async def hits_equal_cold(one: Engine, report: Report) -> None:
    text = chat(one, document(1, 120), "Which team keeps the pump?")
    for settings in ({}, {"temperature": 0.8, "seed": 7}):
        wrong = []
        for length in (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 17, 5 * CHUNK):
            prompt = [*text[:length], *text[-30:]]
            await ask(one, [*text[:length], 300, 301], 4, "warm")
            warm = await ask(one, prompt, 16, "warm", **settings)
            cold = await ask(one, prompt, 16, f"cold-{length}-{settings}", **settings)
            if warm.cached < length or cold.cached or warm.tokens != cold.tokens:
                wrong.append(f"wrong at {length} ({warm.cached} cached)")
        kind = "sampled with a seed" if settings else "greedy"
        report.check(not wrong, f"a hit answers as a cold run, {kind}, fp32", ", ".join(wrong))
    prompts = [[*text[: 2 * CHUNK + 40 * i], *text[-30:]] for i in range(6)]
    alone = [(await ask(one, prompt, 16, f"alone-{i}")).tokens for i, prompt in enumerate(prompts)]
    together = await asyncio.gather(*(ask(one, prompt, 16, "together") for prompt in prompts))
    report.check(alone == [a.tokens for a in together], "six requests over one prefix answer together as alone, fp32")


async def tiers(one: Engine, report: Report) -> list[int]:
    """A prompt through the tiers; returns it."""
    prompt = chat(one, document(2, 150), "Which team keeps the valve?")
    report.figure("prompt", len(prompt), "tokens")
    cold = await ask(one, prompt, 8)
    report.check(cold.cached == 0, "the first run is cold", where(cold))
    report.figure("TTFT, cold", cold.ttft_s * 1e3, "ms")
    hit = await ask(one, [*prompt[:-1], 260], 8)
    report.check(hit.tiers["gpu"] == len(prompt) - 1, "device hit", where(hit))
    report.figure("TTFT, device hit", hit.ttft_s * 1e3, "ms")
    for tier, name in ((TierName.CPU, "host"), (TierName.DISK, "disk")):
        await push_down(one, prompt, tier)
        lower = await ask(one, [*prompt[:-1], 261], 8)
        report.check(lower.cached >= len(prompt) - CHUNK and lower.tiers[tier.value] > 0, f"{name} hit", where(lower))
        report.figure(f"TTFT, {name} hit", lower.ttft_s * 1e3, "ms")
    return prompt


async def push_down(one: Engine, prompt: list[int], tier: TierName) -> None:
    """Ask for other prompts until the tiers above ``tier`` have nothing of this one."""
    store = one.cache
    assert store is not None
    await asyncio.to_thread(store.flush, 30)
    above = list(TierName)[: list(TierName).index(tier)]
    for number in range(200):
        if not any(store.match(prompt).tiers.get(upper) for upper in above):
            return
        await ask(one, chat(one, document(1000 + number, 150), "Which?"), 1, "others")
        await asyncio.to_thread(store.flush, 30)
    raise SystemExit(f"200 prompts did not push the first one down to {tier}; use a smaller arena")


def where(answer: Answer) -> str:
    return f"{answer.cached} tokens cached, {answer.tiers}"


async def speed(one: Engine, report: Report) -> None:
    prompt = chat(one, document(3, 150), "Which team keeps the battery?")
    await ask(one, prompt, 1)
    gaps = [(await ask(one, prompt, 64)).tpot_s for _ in range(3)]
    report.figure(f"TPOT at {len(prompt)} tokens of context", median(gaps) * 1e3, "ms")
    for streams in (1, 4, 8, 16):
        report.figure(f"{streams} streams over that prefix", await rate(one, [(prompt, {})] * streams, 48), "tokens/s")


async def memory(one: Engine, args: argparse.Namespace, report: Report) -> None:
    """Passes over more prefixes than the arena holds: after the first, every buffer has been made."""
    store = one.cache
    assert store is not None
    chunks = store.stats().pages_total
    prefixes = -(-chunks * 5 // 4 * CHUNK // 3300) + 1
    peaks = []
    for number in range(3):
        for seed in range(prefixes):
            await ask(one, chat(one, document(2000 + seed, 150), f"Question {number}?"), 2, "memory")
        peaks.append(in_use(args.device))
    report.figure(f"memory after a pass over {prefixes} prefixes", peaks[0] / 2**20, "MiB")
    report.check(
        peaks[-1] <= 1.02 * peaks[0],
        "memory stays where it is after the first pass",
        ", ".join(f"{peak / 2**20:.0f} MiB" for peak in peaks),
    )
    if args.device == "cuda":
        used = one.memory()
        budget = (args.utilization or small_utilization()) * used["total"]
        report.check(used["allocated"] <= budget, "weights, arena and activations under gpu_memory_utilization")


def in_use(device: str) -> int:
    return torch.cuda.memory_reserved() if device == "cuda" else psutil.Process().memory_info().rss


async def out_of_memory(one: Engine, report: Report) -> None:
    prompt = chat(one, document(4, 40), "Which team?")
    real = one._runner.forward

    def too_much(batch: Any) -> torch.Tensor:
        if torch.cuda.is_available():
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")  # the allocator's own error, out of a real step
        raise torch.OutOfMemoryError("no CUDA device: raised by the check")

    one._runner.forward = too_much  # type: ignore[method-assign]
    try:
        await ask(one, prompt, 4, "oom")
        ended = False
    except EngineError:
        ended = True
    finally:
        one._runner.forward = real  # type: ignore[method-assign]
    report.check(ended, "out of memory ends the request with an error")
    answer = await ask(one, prompt, 4, "oom")
    report.check(answer.cached == 0, "nothing of the failed step is cached")
    fresh = await ask(one, prompt, 4, "oom-cold")
    report.check(answer.tokens == fresh.tokens, "the next request is answered")


if __name__ == "__main__":
    main()
