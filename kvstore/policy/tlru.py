"""T-LRU, LRU that gives up harmless tails first (Zhang et al., Tail-Optimized Caching for LLM Inference, 2025)."""

from collections.abc import Hashable, Sequence

from kvstore.policy.base import Chunk, EvictionPolicy, Rank

#: Tokens that the next turn can afford to compute anew without a slow first token.
_SLACK_TOKENS = 1024

_FREE, _KEPT = 0, 1


class TailLru(EvictionPolicy):
    """The last tokens of each conversation leave before anything else; all the rest is LRU.

    Losing them lengthens the next turn's prefill by no more than the slack, so the slowest requests don't get slower.
    """

    name = "tlru"

    def __init__(self) -> None:
        self._free: set[Hashable] = set()  # of the request that was observed last

    def observe(self, chain: Sequence[Chunk], now: float) -> None:
        self._free.clear()
        slack = _SLACK_TOKENS
        for chunk in reversed(chain):
            slack -= chunk.n_tokens
            if slack < 0:
                return
            self._free.add(chunk.key)

    def rank(self, chunk: Chunk) -> Rank:
        return Rank(_FREE if chunk.key in self._free else _KEPT, chunk.stats.last_access)
