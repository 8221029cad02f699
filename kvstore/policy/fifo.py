"""First in, first out: use does not matter."""

from kvstore.policy.base import Chunk, EvictionPolicy, Rank


class Fifo(EvictionPolicy):
    name = "fifo"

    def rank(self, chunk: Chunk) -> Rank:
        return Rank(0, chunk.stats.created)
