"""IMPRESS's rule, access frequency x share of important tokens (FAST'25), with GreedyDual's ageing."""

from kvstore.policy.base import EvictionPolicy
from kvstore.tiers.base import ChunkStats


class ImportanceScore(EvictionPolicy):
    """Score of a chunk plus an inflation clock that rises to the priority of whatever is evicted.

    The published rule has no ageing: a chunk that was popular once would stay for good. With the clock (Cao and
    Irani, GreedyDual-Size, 1997) a chunk that is no longer used falls behind those used since.
    """

    name = "importance_score"

    def __init__(self) -> None:
        self._clock = 0.0

    def priority(self, stats: ChunkStats) -> float:
        return self._clock + stats.accesses * stats.important_share

    def on_evict(self, priority: float) -> None:
        self._clock = max(self._clock, priority)
