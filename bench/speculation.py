"""Prompt-lookup speculation: tokens a second with and without, in one process, rounds interleaved.

    python -m bench.speculation [--rounds 5] [--streams 1 4] [--json FILE] [--plot FILE]

Workloads: *extract* and *summarise* over a long document, where answers repeat parts of it; *nothing matches*: random
tokens as prompt, and answers under penalties, so that no three tokens come twice and every lookup is in vain; *false
matches*: answers sampled hot from few words over a text of the same words, so that matches are found all the time and
nearly all are refused. The last two show what speculation costs where it can't help.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from bench.common import SENTENCES, document, dtype_name, machine_line, median
from bench.inprocess import chat, make_engine, rate
from gateway.engine.engine import Engine

SIZES = {"2k": 2000, "6k": 6000}

WORKLOADS = ("extract", "summarise", "nothing matches", "false matches")

#: Common words; any three of them in a row come often in thousands of draws.
_FEW = (260, 284, 281, 253, 338, 327)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--size", choices=SIZES, default="6k")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--plot", type=Path, help="draw them to this file (needs the extra `plot`)")
    args = parser.parse_args()
    print(machine_line())
    print(f"SmolLM2-135M-Instruct, {dtype_name()}; document of {args.size} tokens")
    print(f"medians of {args.rounds} interleaved rounds\n")
    print(
        "| workload | streams | tokens/s without | with | factor | drafted | accepted |\n" + "|---" * 7 + "|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), args))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine_line(), "figures": figures}, indent=1))
    if args.plot:
        from bench.plots import plot_speculation

        plot_speculation(figures, machine_line(), args.plot)


async def measure(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    on, off = engine(folder / "on", True), engine(folder / "off", False)
    figures = []
    try:
        await on.start()
        await off.start()
        for name, prompts in workloads(on, args.size).items():
            if name not in args.workloads:
                continue
            for streams in args.streams:
                figures.append(await compare(name, prompts, streams, on, off, args))
                show(figures[-1])
    finally:
        await on.close()
        await off.close()
    return figures


def show(row: dict[str, Any]) -> None:
    share = f"{row['accepted'] / row['drafted']:.0%}" if row["drafted"] else "nothing drafted"
    print(
        f"| {row['workload']} | {row['streams']} | {row['without']:.1f} | {row['with']:.1f} | "
        f"{row['factor']:.2f} | {row['drafted']} | {share} |",
        flush=True,
    )


async def compare(
    name: str, prompts: list[tuple[list[int], dict[str, Any]]], streams: int, on: Engine, off: Engine, args: Any
) -> dict[str, Any]:
    asked = [prompts[i % len(prompts)] for i in range(streams)]
    for each in (on, off):  # the prefix is computed, and what speculation learns is learned
        await rate(each, asked, min(16, args.tokens))
    rates: dict[Engine, list[float]] = {on: [], off: []}
    drafted, accepted = on.stats().drafted_tokens, on.stats().accepted_tokens
    for number in range(args.rounds):
        for each in (on, off) if number % 2 else (off, on):
            rates[each].append(await rate(each, asked, args.tokens))
    return {
        "workload": name,
        "streams": streams,
        "without": median(rates[off]),
        "with": median(rates[on]),
        "factor": median([a / b for a, b in zip(rates[on], rates[off], strict=True)]),
        "drafted": on.stats().drafted_tokens - drafted,
        "accepted": on.stats().accepted_tokens - accepted,
    }


def engine(folder: Path, speculation: bool) -> Engine:
    return make_engine(folder, cache={"tiering": ["gpu"], "device_cache_gb": 0.8}, speculation=speculation)


def workloads(one: Engine, size: str) -> dict[str, list[tuple[list[int], dict[str, Any]]]]:
    """Prompts and sampling settings, by name."""
    lines = document(41, SENTENCES[size]).split(". ")
    text = ". ".join(lines)
    picked = [lines[len(lines) * i // 8] for i in range(1, 8)]
    choose = random.Random(3)
    n_tokens = SIZES[size]
    noise = [choose.randrange(1000, 48000) for _ in range(n_tokens)]
    few = [choose.choice(_FEW) for _ in range(n_tokens)]
    greedy: dict[str, Any] = {"temperature": 0.0}
    no_repeats = {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 2.0}
    hot = {"temperature": 1.0, "logit_bias": dict.fromkeys(_FEW, 30.0)}
    return {
        "extract": [
            (chat(one, text, f"Copy every sentence about the {noun}.", f"{line}. "), greedy)
            for noun, line in zip(("pump", "valve", "router", "battery"), picked, strict=False)
        ],
        "summarise": [
            (chat(one, text, f"Summarise the handbook for the {team} team, quoting the rules.", ""), greedy)
            for team in ("pump", "valve", "router", "battery")
        ],
        "nothing matches": [([*noise, i], no_repeats) for i in range(4)],
        "false matches": [([*few, i], {**hot, "seed": i}) for i in range(4)],
    }


if __name__ == "__main__":
    main()
