"""Resident memory over a workload that evicts in all three tiers.

    .venv/bin/python -m bench.memory --requests 200 --prefixes 20

Tiers are so small that 20 prefixes of 2,000 tokens don't fit in any of them. Prints RSS over the run and the largest
distance from its value after the first pass over the prefixes, when every buffer has been touched once.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import httpx
import psutil

from bench.common import SENTENCES, ask, document, free_port, kvgate_command, machine_line, running, write_config


def kinds(pid: int) -> str:
    """Resident MiB by kind: anonymous (heaps, weights, tiers) and file (the disk tier's map, libraries)."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return ", ".join(f"{name} {int(status[name].split()[0]) // 1024}" for name in ("VmRSS", "RssAnon", "RssFile"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prefixes", type=int, default=20)
    args = parser.parse_args()
    choose = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(
            Path(folder) / "config.toml", device_gb=0.2, cpu_gb=0.2, disk_gb=0.4, store=Path(folder) / "store"
        )
        port = free_port()
        rss: list[int] = []
        cached = prompt = 0
        with running(kvgate_command(config, port), port, "demo") as server:
            process = psutil.Process(server.pid)
            for number in range(args.requests):
                prefix = number if number < args.prefixes else choose.randrange(args.prefixes)
                timing = ask(server, document(prefix, SENTENCES["2k"]), f"Question {number}: which team?", 8)
                cached += timing.cached_tokens
                prompt += timing.prompt_tokens
                rss.append(process.memory_info().rss)
                if number % args.prefixes == args.prefixes - 1:
                    print(f"after {number + 1:4} requests: {kinds(server.pid)}", flush=True)
            metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    print(machine_line())
    print(
        f"{args.requests} requests, {args.prefixes} prefixes of ~{timing.prompt_tokens} tokens, "
        f"{cached / prompt:.0%} of prompt tokens from the cache"
    )
    base = rss[args.prefixes - 1]
    after = rss[args.prefixes :]
    worst = max(abs(value - base) for value in after)
    print(
        f"RSS in MiB: start {rss[0] / 2**20:.0f}, after the first pass {base / 2**20:.0f}, "
        f"min {min(after) / 2**20:.0f}, max {max(after) / 2**20:.0f}, end {rss[-1] / 2**20:.0f}; "
        f"largest distance from the first pass {worst / base:.1%}, over all requests from the start "
        f"{max(abs(value - rss[0]) for value in rss) / rss[0]:.1%}"
    )
    for line in metrics.splitlines():
        if line.startswith(("kvgate_tier_evictions_total", "kvgate_prefix_tokens_total", "kvgate_dropped_stores")):
            print(line)


if __name__ == "__main__":
    main()
