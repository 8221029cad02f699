"""Cost-aware GreedyDual-Size-Frequency (Cherkasova 1998, after Cao and Irani's GreedyDual-Size, USITS'97)."""

from kvstore.policy.base import Chunk, Entry, EvictionPolicy, Rank

#: At this position attention to the prefix costs as much as the rest of the layer, for models of about 8B.
_EQUAL_WORK_TOKENS = 8192


class Gdsf(EvictionPolicy):
    """Frequency x cost / size, plus a clock that rises to the priority of whatever is evicted.

    Cost over size is the prefill work of one token at the chunk's place: later tokens attend to more of them. With
    the clock, a chunk that is no longer used falls behind those used since.
    """

    name = "gdsf"

    def __init__(self) -> None:
        self._clock = 0.0
        self._whole = 1  # tokens of a whole chunk, as far as seen

    def rank(self, chunk: Chunk) -> Rank:
        self._whole = max(self._whole, chunk.n_tokens)
        cost = 1.0 + chunk.depth * self._whole / _EQUAL_WORK_TOKENS
        return Rank(0, self._clock + chunk.stats.accesses * cost)

    def on_evict(self, entry: Entry) -> None:
        self._clock = max(self._clock, entry.rank.priority)
