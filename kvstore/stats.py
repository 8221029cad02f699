"""Counters of the store, and the snapshot that metrics read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvstore.tiers.base import TierName, TierUsage


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot. Counts only grow; ``sum(hit_tokens) + miss_tokens == lookup_tokens`` at any time."""

    lookups: int
    lookup_tokens: int
    hit_tokens: dict[TierName, int]
    miss_tokens: int
    evictions: dict[tuple[TierName, str], int]
    promotions: dict[TierName, int]  # by the tier they came from
    demotions: dict[TierName, int]  # by the tier they went to
    dropped_stores: dict[str, int]
    integrity_failures: dict[tuple[TierName, str], int]
    usage: dict[TierName, TierUsage]
    leases: int
    pages_total: int
    pages_free: int
    disk_read_bytes: int
    disk_write_bytes: int
    disk_read_seconds: float
    disk_write_seconds: float
    #: Hits below the device, by what was done with them: "load", "recompute" or "split".
    planner_decisions: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class StoreCounters:
    lookups: int = 0
    lookup_tokens: int = 0
    miss_tokens: int = 0
    hit_tokens: Counter[TierName] = field(default_factory=Counter)
    evictions: Counter[tuple[TierName, str]] = field(default_factory=Counter)
    promotions: Counter[TierName] = field(default_factory=Counter)
    demotions: Counter[TierName] = field(default_factory=Counter)
    dropped_stores: Counter[str] = field(default_factory=Counter)
    integrity_failures: Counter[tuple[TierName, str]] = field(default_factory=Counter)
    planner_decisions: Counter[str] = field(default_factory=Counter)
    leases: int = 0
