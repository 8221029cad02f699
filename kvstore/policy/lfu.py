"""Least frequently used."""

from kvstore.policy.base import EvictionPolicy
from kvstore.tiers.base import ChunkStats


class Lfu(EvictionPolicy):
    name = "lfu"

    def priority(self, stats: ChunkStats) -> float:
        return float(stats.accesses)
