"""Least frequently used; among equals the least recently used."""

from kvstore.policy.base import Chunk, EvictionPolicy, Rank


class Lfu(EvictionPolicy):
    name = "lfu"

    def rank(self, chunk: Chunk) -> Rank:
        return Rank(0, float(chunk.stats.accesses))
