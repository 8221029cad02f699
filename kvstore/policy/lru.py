"""Least recently used."""

from kvstore.policy.base import EvictionPolicy
from kvstore.tiers.base import ChunkStats


class Lru(EvictionPolicy):
    name = "lru"

    def priority(self, stats: ChunkStats) -> float:
        return stats.last_access
