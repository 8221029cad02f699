"""IMPRESS's published rule (FAST'25): access frequency x share of important tokens."""

from kvstore.policy.base import Chunk, EvictionPolicy, Rank


class Impress(EvictionPolicy):
    """As published, without ageing: a chunk that was popular once stays until all others are as popular."""

    name = "impress"

    def rank(self, chunk: Chunk) -> Rank:
        return Rank(0, chunk.stats.accesses * chunk.stats.important_share)
