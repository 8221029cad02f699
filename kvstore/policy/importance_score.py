"""The default: expected uses per second of room, learned online, x share of important tokens.

IMPRESS (FAST'25) multiplies importance with access frequency. Frequency alone can lose tens of points of hits against
LRU, so here the first factor is learned (``kvstore.policy.reuse``); the published rule is ``impress``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvstore.policy.base import Chunk, Entry, EvictionPolicy, Lane, Rank
from kvstore.policy.reuse import ReuseModel, age_bucket

#: Importance is counted in octaves around the share that a chunk of average importance has.
_AVERAGE_SHARE = 0.25
_OCTAVES = 2
_LEVELS = 2 * _OCTAVES + 1


class ImportanceScore(EvictionPolicy):
    """One lane for each class of chunks and octave of importance, in order of age; the least valuable end leaves.

    Within a class the value mostly rises until the usual time to the next use and falls from then on, so that the
    least valuable chunk is the oldest or the youngest. What is learned is not kept over a restart; uses and
    importance of the chunks are.
    """

    name = "importance_score"
    two_ended = True

    def __init__(self, model: ReuseModel | None = None) -> None:
        self._model = model if model is not None else ReuseModel()
        self._best: dict[int, tuple[int, float, Entry | None]] = {}  # by lane: its version, lowest value, and whose
        self._stamp = (0.0, 0)

    def observe(self, chain: Sequence[Chunk], now: float) -> None:
        self._model.observe(chain, now)

    def rank(self, chunk: Chunk) -> Rank:
        stats = chunk.stats
        return Rank(self._model.class_of(chunk) * _LEVELS + _level(stats.important_share), stats.last_access)

    def pick(self, lanes: Mapping[int, Lane]) -> Entry | None:
        if self._stamp != (self._model.now, self._model.version):
            self._stamp = (self._model.now, self._model.version)
            self._best.clear()
        lowest, found = math.inf, None
        for number, lane in lanes.items():
            known = self._best.get(number)
            if known is None or known[0] != lane.version:
                known = self._best[number] = (lane.version, *self._lowest(number, lane))
            if known[1] < lowest:
                lowest, found = known[1], known[2]
        return found

    def sibling(self) -> ImportanceScore:
        return ImportanceScore(self._model)

    def _lowest(self, number: int, lane: Lane) -> tuple[float, Entry | None]:
        first = lane.first()
        if first is None:
            return math.inf, None
        last = lane.last() or first
        of_first, of_last = self._value(number, first), self._value(number, last)
        return (of_first, first) if of_first <= of_last else (of_last, last)

    def _value(self, number: int, entry: Entry) -> float:
        kind, level = divmod(number, _LEVELS)
        age = self._model.now - entry.rank.priority
        return self._model.value[kind][age_bucket(age)] * 2.0 ** (level - _OCTAVES)


def _level(share: float) -> int:
    ratio = max(share / _AVERAGE_SHARE, 2.0**-_OCTAVES)
    return min(round(math.log2(ratio)), _OCTAVES) + _OCTAVES
