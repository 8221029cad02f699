"""Least recently used."""

from kvstore.policy.base import Chunk, EvictionPolicy, Rank


class Lru(EvictionPolicy):
    name = "lru"

    def rank(self, chunk: Chunk) -> Rank:
        return Rank(0, chunk.stats.last_access)
