"""Beside the peers: us and every peer that is installed, in turn, on the same model and prompts, in one table.

    python -m bench.peers --vllm VENV --llama VENV --transformers VENV --model FOLDER

FOLDER is the model as a Hugging Face folder, by default our unpacked demo model; ``--gguf`` is the file that llama.cpp
gets, by default the demo package's own (Q4_1, where the others have bf16: fewer bytes to read, another rounding).
A peer whose environment isn't given or lacks it is left out by name.

In each round every server is started, measured, and started anew for "after restart"; rounds of the servers alternate
and figures are medians over rounds. Servers that know ``ignore_eos`` get it; token counts are those of the usage chunk,
or of the content chunks where a server sends none. Factors compare with us: above 1 we are better. Speculation
is off in all of them, as it is by default in vLLM, unless ``--speculation`` turns ours on: bench.speculation shows it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.common import (
    SENTENCES,
    Server,
    Timing,
    ask,
    ask_cold,
    document,
    dtype_name,
    machine_line,
    median,
    warm_up,
)
from bench.servers import demo_folder, start_kvgate, start_llama, start_transformers, start_vllm
from gateway.engine.sources import demo_gguf

SECTIONS = ("ttft", "tpot", "streams", "restart")

#: Questions that a small model answers at length, for those servers that can't be told to go on.
QUESTIONS = (
    "Write a long report on the handbook, section by section, beginning with the first.",
    "List every item of the document with all its details, one after another.",
    "Explain each sentence of the document in your own words, in order.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: what it is, its unit, and whether more is better."""

    section: str
    name: str
    unit: str
    more_is_better: bool = False


Figures = dict[str, dict[Row, list[float]]]


@dataclass(frozen=True, slots=True)
class Peer:
    """``start(folder)`` runs the server; what it keeps over a restart, it keeps in ``folder``."""

    name: str
    start: Callable[[Path], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="a virtual environment with vLLM")
    parser.add_argument("--llama", type=Path, help="a virtual environment with llama-cpp-python[server]")
    parser.add_argument("--transformers", type=Path, help="a virtual environment with transformers[serving]")
    parser.add_argument("--model", type=Path, help="the model as a Hugging Face folder; default: the demo model")
    parser.add_argument("--gguf", type=Path, help="the model as GGUF for llama.cpp; default: the demo model's file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--quick", action="store_true", help="one round, 1 and 4 streams, short answers")
    parser.add_argument("--speculation", action="store_true", help="leave our speculation on")
    parser.add_argument("--plot", type=Path, help="draw the figures to this file (needs the extra `plot`)")
    parser.add_argument("--json", type=Path, help="write all figures to this file as well")
    args = parser.parse_args()
    # As Ctrl-C: servers are ended on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.quick:
        args.rounds, args.streams = 1, [n for n in args.streams if n <= 4]
    peers = installed(args)
    figures: Figures = {peer.name: defaultdict(list) for peer in peers}
    try:
        for number in range(args.rounds):
            for peer in peers:
                started = time.monotonic()
                measure(peer, figures[peer.name], number, args)
                took = time.monotonic() - started
                print(f"round {number + 1}: {peer.name} done in {took:.0f} s", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        sys.exit("interrupted; all servers are ended")
    print(f"{machine_line()}\nSmolLM2-135M-Instruct, {dtype_name()}; medians of {args.rounds} interleaved rounds\n")
    print(table(figures))
    if args.json:
        args.json.write_text(as_json(figures, args.rounds))
    if args.plot:
        from bench.plots import plot_peers

        plot_peers(as_json(figures, args.rounds), args.plot)


def installed(args: argparse.Namespace) -> list[Peer]:
    """We and the peers that can be started; says which can't and why."""
    model = str(args.model or demo_folder())
    peers = [Peer("kvgate", lambda folder: start_kvgate(folder, model, args.speculation))]
    wanted: list[tuple[str, Path | None, str, Callable[[Path, Path], Any]]] = [
        ("vLLM", args.vllm, "bin/vllm", lambda venv, _: start_vllm(venv, model)),
        ("llama.cpp", args.llama, "bin/python", lambda venv, _: start_llama(venv, args.gguf or demo_gguf())),
        ("transformers", args.transformers, "bin/transformers", lambda venv, _: start_transformers(venv, model)),
    ]
    for name, venv, program, start in wanted:
        if venv is None:
            print(f"{name}: left out, --{name.lower().split('.')[0]} isn't given")
        elif not (venv / program).exists():
            print(f"{name}: left out, there is no {venv / program}")
        else:
            peers.append(Peer(name, lambda folder, venv=venv, start=start: start(venv, folder)))
    return peers


# What is measured -------------------------------------------------------------------------------------------------


def measure(peer: Peer, figures: dict[Row, list[float]], number: int, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with peer.start(folder) as server:
            warm_up(server)
            for section, run in (("ttft", first_tokens), ("tpot", gaps), ("streams", streams)):
                if section in args.sections:
                    run(server, figures, number, args)
            if "restart" in args.sections and "ttft" not in args.sections:
                ask(server, document(100 + number, SENTENCES["7k"]), QUESTIONS[0], 8)
            figures[Row("memory", "peak RSS of all its processes", "MiB")].append(peak_rss(server.pid) / 2**20)
        if "restart" in args.sections:
            with peer.start(folder) as server:
                warm_up(server)
                timing = ask(server, document(100 + number, SENTENCES["7k"]), QUESTIONS[1], 8)
                figures[Row("ttft", "TTFT after restart, 7k", "s")].append(timing.ttft_s)


def first_tokens(server: Server, figures: dict[Row, list[float]], number: int, args: argparse.Namespace) -> None:
    for size, seed in (("4k", 200), ("7k", 100)):  # other documents: one would be the beginning of the other
        prefix = document(seed + number, SENTENCES[size])
        figures[Row("ttft", f"TTFT cold, {size}", "s")].append(ask_cold(server, prefix, QUESTIONS[0], 8).ttft_s)
        hits = [ask(server, prefix, question, 8).ttft_s for question in QUESTIONS[1:]]
        figures[Row("ttft", f"TTFT hit, {size}", "s")].append(median(hits))


def gaps(server: Server, figures: dict[Row, list[float]], number: int, args: argparse.Namespace) -> None:
    tokens = 24 if args.quick else 96
    for size in ("512", "6k"):
        prefix = document(300 + number, SENTENCES[size])
        ask(server, prefix, QUESTIONS[0], 2)
        timing = ask(server, prefix, QUESTIONS[0], tokens)
        if timing.tpot_s is not None:
            figures[Row("tpot", f"TPOT at {size} tokens of context", "ms")].append(timing.tpot_s * 1e3)


def streams(server: Server, figures: dict[Row, list[float]], number: int, args: argparse.Namespace) -> None:
    tokens = 24 if args.quick else 64
    shared = document(400 + number, SENTENCES["6k"])
    ask(server, shared, QUESTIONS[0], 2)
    for n in args.streams:
        rate = together(server, [(shared, f"{QUESTIONS[i % 3]} Reader {i}.") for i in range(n)], tokens)
        figures[Row("streams", f"tokens/s, {n} streams over one 6k prefix", "/s", True)].append(rate)
    for n in args.streams:
        own = [(document(1000 * (n + 1) + 20 * number + i, SENTENCES["512"]), QUESTIONS[0]) for i in range(n)]
        for system, question in own:
            ask(server, system, question, 2)
        figures[Row("streams", f"tokens/s, {n} streams of 512 tokens each", "/s", True)].append(
            together(server, own, tokens)
        )


def together(server: Server, prompts: list[tuple[str, str]], tokens: int) -> float:
    """Tokens a second of concurrent requests, from the first token of any to the last of all."""
    barrier = threading.Barrier(len(prompts))

    def one(prompt: tuple[str, str]) -> Timing:
        barrier.wait()
        return ask(server, *prompt, tokens)

    with ThreadPoolExecutor(len(prompts)) as pool:
        timings = list(pool.map(one, prompts))
    began = min(t.started + t.ttft_s for t in timings)
    ended = max(t.ended for t in timings)
    return (sum(t.completion_tokens for t in timings) - 1) / (ended - began)


def peak_rss(pid: int) -> int:
    """Sum of the kernel's high-water marks over a server's processes; pages they share count in each."""
    root = psutil.Process(pid)
    total = 0
    for process in (root, *root.children(recursive=True)):
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            continue
        total += next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0)
    return total


# What is shown ----------------------------------------------------------------------------------------------------


def table(figures: Figures) -> str:
    names = list(figures)
    rows = list(dict.fromkeys(row for name in names for row in figures[name]))
    rows.sort(key=lambda row: ("ttft", "tpot", "streams", "memory").index(row.section))
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        cells = []
        ours = median(figures["kvgate"].get(row, []))
        for name in names:
            value = median(figures[name].get(row, []))
            if value != value:
                cells.append("none")
            elif name == "kvgate":
                cells.append(_number(value))
            else:
                factor = ours / value if row.more_is_better else value / ours
                cells.append(f"{_number(value)} ({factor:.2f}×)")
        lines.append(f"| {row.name}, {row.unit} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\nIn brackets: how many times better kvgate is; below 1 the peer is better."


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def as_json(figures: Figures, rounds: int) -> str:
    return json.dumps(
        {
            "machine": machine_line(),
            "rounds": rounds,
            "figures": [
                {**asdict(row), "server": name, "median": median(values), "values": values}
                for name, rows in figures.items()
                for row, values in rows.items()
            ],
        },
        indent=1,
    )


if __name__ == "__main__":
    main()
