"""``kvgate replay``: eviction policies over a request trace, as a table, CSV and plot."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.policy import POLICIES
from kvstore.replay import Outcome, TierSizes, Trace, TraceError, belady, read_trace, replay
from kvstore.tiers.base import TierName

#: The name of the bound in tables.
BOUND = "belady"


class ReplayError(Exception):
    """One sentence for the user."""


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one capacity. Rates are shares of all prompt tokens."""

    trace: str
    capacity: str
    blocks: int
    outcome: Outcome
    bound: float  # Belady's hit rate at the same capacity
    lru: float | None  # LRU's, where it was run too

    @property
    def closed(self) -> float | None:
        """Share of LRU's distance to the bound that the policy closes."""
        if self.lru is None or self.bound - self.lru < 1e-9:
            return None
        return (self.outcome.hit_rate - self.lru) / (self.bound - self.lru)


def load(path: Path) -> Trace:
    """Raises ReplayError."""
    try:
        return read_trace(path)
    except TraceError as error:
        raise ReplayError(str(error)) from None


def check_policies(names: Sequence[str]) -> list[str]:
    """The policies to run, all for none. Raises ReplayError for an unknown one."""
    for name in names:
        if name not in POLICIES:
            raise ReplayError(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    return list(dict.fromkeys(names)) or list(POLICIES)


def parse_capacity(text: str, distinct: int) -> TierSizes:
    """Sizes from ``"5"`` (one tier) or ``"1/4/20"`` (device/host/disk), in % of the distinct blocks.

    A ``b`` after a number makes it blocks. Raises ReplayError.
    """
    sizes = [_blocks(part.strip(), text, distinct) for part in text.split("/")]
    if len(sizes) > len(TierName):
        raise ReplayError(f"--capacity {text}: at most three sizes: device/host/disk")
    if sizes[0] < 1:
        raise ReplayError(f"--capacity {text}: the device tier would have no block; the trace has {distinct}")
    return TierSizes(*sizes)


def _blocks(part: str, text: str, distinct: int) -> int:
    try:
        number = int(part[:-1]) if part.endswith("b") else float(part.removesuffix("%")) * distinct / 100
    except ValueError:
        number = math.nan
    if not 0 <= number < 2**40:  # also refuses nan
        raise ReplayError(
            f"--capacity {text}: write % of the distinct blocks, or blocks with a b, for example 5, 1/4/20 or 2000b"
        )
    return round(number)


def run(trace: Trace, policies: Sequence[str], capacities: Sequence[str]) -> Iterator[Row]:
    """All policies at all capacities, row by row; LRU first, so that others can be compared with it.

    Raises:
        ReplayError: a capacity that can't be read.
    """
    distinct = trace.distinct_blocks()
    all_sizes = [(text, parse_capacity(text, distinct)) for text in capacities]
    order = sorted(policies, key=lambda name: name != "lru")
    for text, sizes in all_sizes:
        bound = belady(trace, sizes.total) / trace.prompt_tokens
        lru: float | None = None
        for policy in order:
            outcome = replay(trace, policy, sizes)
            lru = outcome.hit_rate if policy == "lru" else lru
            yield Row(trace.name, text, sizes.total, outcome, bound, lru)


HEADER = f"{'capacity':>12} {'policy':<17}{'hit %':>7}{'gpu':>7}{'cpu':>7}{'disk':>7}{'saved %':>9}{'to bound':>10}"
HEADER += f"{'closed':>8}{'us/chunk':>10}"


def line(row: Row) -> str:
    outcome = row.outcome
    tiers = "".join(f"{100 * outcome.tier_rate(tier):7.2f}" for tier in TierName)
    closed = "" if row.closed is None else f"{row.closed:.0%}"
    return (
        f"{row.capacity:>12} {outcome.policy:<17}{100 * outcome.hit_rate:7.2f}{tiers}{100 * outcome.saved_share:9.2f}"
        f"{100 * (row.bound - outcome.hit_rate):10.2f}{closed:>8}{outcome.microseconds_a_chunk:10.1f}"
    )


def summary(trace: Trace) -> str:
    return (
        f"{trace.name}: {len(trace)} requests, {trace.prompt_tokens} prompt tokens, {trace.distinct_blocks()} distinct "
        f"blocks of {trace.block_tokens} tokens\n"
        "capacity: % of the distinct blocks; closed: share of LRU's distance to Belady's bound; us/chunk: CPU time"
    )


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Raises ReplayError."""
    columns = ["trace", "capacity", "blocks", "policy", "hit_rate", *(f"hit_{tier}" for tier in TierName)]
    columns += ["saved_work", "bound", "closed", "us_per_chunk"]
    try:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(_cells(row) for row in rows)
    except OSError as error:
        raise ReplayError(f"--csv {path}: can't be written ({error.strerror})") from None


def _cells(row: Row) -> list[object]:
    outcome = row.outcome
    numbers = [outcome.hit_rate, *(outcome.tier_rate(tier) for tier in TierName), outcome.saved_share, row.bound]
    closed = "" if row.closed is None else f"{row.closed:.4f}"
    head: list[object] = [row.trace, row.capacity, row.blocks, outcome.policy]
    return [*head, *(f"{number:.6f}" for number in numbers), closed, f"{outcome.microseconds_a_chunk:.2f}"]


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Hit rate over capacity, a line a policy. Raises ReplayError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ReplayError("--plot needs matplotlib: pip install 'kvgate[plot]'") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(row.outcome.policy for row in rows):
        points = [(row.blocks, 100 * row.outcome.hit_rate) for row in rows if row.outcome.policy == policy]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=policy)
    bound = sorted({(row.blocks, 100 * row.bound) for row in rows})
    axes.plot(*zip(*bound, strict=True), color="black", linestyle="--", label=BOUND)
    axes.set(xlabel="capacity in blocks", ylabel="token hits in %", xscale="log", title=rows[0].trace)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ReplayError(f"--plot {path}: can't be written ({error})") from None
