"""Time to first token of long shared prefixes: cold, and hit from each tier, also after a restart.

    make bench                                        # kvgate alone
    .venv/bin/python -m bench.ttft --vllm VENV --vllm-model FOLDER   # with vLLM in the same run

kvgate runs with an arena that holds one long prompt, so that another prompt pushes the first out to host memory;
the disk figure is the first request of a fresh process. ``disk, cold`` drops the store's file from the page cache
first (posix_fadvise). Rounds of kvgate and the peer alternate; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from bench.common import (
    SENTENCES,
    Timing,
    ask,
    ask_cold,
    document,
    dtype_name,
    free_port,
    kvgate_command,
    machine_line,
    median,
    running,
    warm_up,
    write_config,
)
from bench.servers import start_vllm

#: The sizes measured, with the seeds of their documents: of one seed, the shorter would be the beginning of the longer.
SEEDS = {"4k": 100, "7k": 200}
QUESTIONS = ("Which team keeps the pump?", "How many screws are in the box?", "What is checked before a refund?")

Figures = dict[str, dict[str, list[Timing]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", type=Path, help="a virtual environment with vLLM")
    parser.add_argument("--vllm-model", type=Path, help="the same model as a Hugging Face folder")
    args = parser.parse_args()
    kvgate: Figures = defaultdict(lambda: defaultdict(list))
    vllm: Figures = defaultdict(lambda: defaultdict(list))
    for round_number in range(args.rounds):
        measure_kvgate(kvgate, round_number)
        if args.vllm:
            measure_vllm(vllm, round_number, args.vllm, args.vllm_model)
    print(machine_line())
    print(f"SmolLM2-135M-Instruct, {dtype_name()}; medians of {args.rounds} rounds\n")
    report(kvgate, vllm)


def measure_kvgate(figures: Figures, round_number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        config = write_config(root / "config.toml", device_gb=0.2, cpu_gb=1, disk_gb=4, store=root / "store")
        with kvgate(config) as server:
            ask(server, "You are brief.", "Say hello.")
            for size, seed in SEEDS.items():
                prefix = document(seed + round_number, SENTENCES[size])
                figures["cold"][size].append(ask_cold(server, prefix, QUESTIONS[0], 32))
                figures["device hit"][size].append(ask(server, prefix, QUESTIONS[1], 32))
                ask(server, document(900 + round_number, SENTENCES["7k"]), QUESTIONS[0], 2)
                figures["host hit"][size].append(ask(server, prefix, QUESTIONS[2], 32))
        for label in ("disk hit, fresh process", "disk hit, fresh process, cold page cache"):
            if label.endswith("cache"):
                drop_page_cache(root / "store")
            with kvgate(config) as server:
                ask(server, "You are brief.", "Say hello.")
                for size, seed in SEEDS.items():
                    prefix = document(seed + round_number, SENTENCES[size])
                    figures[label][size].append(ask(server, prefix, QUESTIONS[1], 32))


def kvgate(config: Path):  # type: ignore[no-untyped-def]
    port = free_port()
    return running(kvgate_command(config, port), port, "demo")


def measure_vllm(figures: Figures, round_number: int, venv: Path, model: Path) -> None:
    with start_vllm(venv, str(model)) as server:
        warm_up(server)
        for size, seed in SEEDS.items():
            prefix = document(seed + round_number, SENTENCES[size])
            figures["cold"][size].append(ask_cold(server, prefix, QUESTIONS[0], 32))
            figures["warm hit"][size].append(ask(server, prefix, QUESTIONS[1], 32))


def drop_page_cache(store: Path) -> None:
    for file in store.rglob("*.mdb"):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(0.2)


def report(kvgate: Figures, vllm: Figures) -> None:
    def ttft(figures: Figures, label: str, size: str) -> float:
        return median([t.ttft_s for t in figures[label][size]])

    sizes = list(SEEDS)
    print(f"{'TTFT in s':44}" + "".join(f"{size:>10}{'to vLLM':>10}" for size in sizes) + "   source")
    rows = [("kvgate", kvgate, label) for label in kvgate] + [("vLLM", vllm, label) for label in vllm]
    for name, figures, label in rows:
        cells = ""
        for size in sizes:
            value = ttft(figures, label, size)
            against = ttft(vllm, "cold" if label == "cold" else "warm hit", size) if vllm else float("nan")
            cells += f"{value:10.3f}{value / against:10.2f}"
        print(f"{name + ': ' + label:44}{cells}   {figures[label][sizes[-1]][-1].source}")
    print()
    for name, figures, label in rows:
        tpot = "".join(
            f"{median([t.tpot_s for t in figures[label][size] if t.tpot_s]) * 1e3:10.1f}{'':10}" for size in sizes
        )
        print(f"{name + ': ' + label + ', TPOT in ms':44}{tpot}")
    tokens = {size: kvgate["cold"][size][0].prompt_tokens for size in sizes}
    print(
        f"\nprompt tokens: {tokens}; cached on a device hit: "
        f"{ {size: kvgate['device hit'][size][0].cached_tokens for size in sizes} }"
    )


if __name__ == "__main__":
    main()
