"""Token hits of all eviction policies over all traces of a folder, with Belady's bound and the CPU time a chunk.

    python -m bench.replay FOLDER [--capacities 1,2,5,10,20,50] [--policies lru,importance_score]

Capacities are in % of a trace's distinct blocks. The time is that of the whole replay, so that a policy's own
decisions cost less; the table gives the worst of all capacities.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from bench.common import machine_line
from gateway.replay import ReplayError, Row, check_policies, load, run, summary


def table(rows: list[Row], capacities: list[str]) -> str:
    """One line a policy, one column a capacity, the bound last."""
    by_policy: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_policy[row.outcome.policy].append(row)
    lines = [f"{'hit %':<18}" + "".join(f"{capacity + ' %':>9}" for capacity in capacities) + f"{'us/chunk':>10}"]
    for policy, found in by_policy.items():
        worst = max(row.outcome.microseconds_a_chunk for row in found)
        lines.append(f"{policy:<18}" + "".join(f"{100 * r.outcome.hit_rate:9.2f}" for r in found) + f"{worst:10.1f}")
    first = next(iter(by_policy.values()))
    lines.append(f"{'belady':<18}" + "".join(f"{100 * row.bound:9.2f}" for row in first))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--capacities", default="1,2,5,10,20,50")
    parser.add_argument("--policies", default="")
    options = parser.parse_args()
    paths = sorted(options.folder.glob("*.jsonl"))
    if not paths:
        sys.exit(f"there is no *.jsonl in {options.folder}")
    capacities = options.capacities.split(",")
    print(machine_line())
    try:
        policies = check_policies([name for name in options.policies.split(",") if name])
        for path in paths:
            trace = load(path)
            print(f"\n{summary(trace)}\n{table(list(run(trace, policies, capacities)), capacities)}", flush=True)
    except ReplayError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
