"""The default: expected uses per second of room, learned online, x share of important tokens.

IMPRESS (FAST'25) multiplies importance with access frequency. Frequency alone can lose tens of points of hits against
LRU, so here the first factor is learned (``kvstore.policy.reuse``); the published rule is ``impress``.
"""

from __future__ import annotations

import heapq
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
        # Lowest value, lane, its version then, and whether it is the youngest chunk's; other versions are stale.
        self._lowest: list[tuple[float, int, int, bool]] = []
        self._stamp = (0.0, 0)

    def observe(self, chain: Sequence[Chunk], now: float) -> None:
        self._model.observe(chain, now)

    def rank(self, chunk: Chunk) -> Rank:
        stats = chunk.stats
        return Rank(self._model.class_of(chunk) * _LEVELS + _level(stats.important_share), stats.last_access)

    def pick(self, lanes: Mapping[int, Lane], changed: set[int]) -> Entry | None:
        stamp = (self._model.now, self._model.version)
        if self._stamp != stamp:
            self._stamp = stamp
            self._lowest = [self._look(number, lane) for number, lane in lanes.items()]
            heapq.heapify(self._lowest)
        else:
            for number in changed:
                heapq.heappush(self._lowest, self._look(number, lanes[number]))
        changed.clear()
        while self._lowest:
            value, number, version, youngest = self._lowest[0]
            lane = lanes[number]
            if version == lane.version:
                return None if value == math.inf else lane.last() if youngest else lane.first()
            heapq.heappop(self._lowest)
        return None

    def sibling(self) -> ImportanceScore:
        return ImportanceScore(self._model)

    def _look(self, number: int, lane: Lane) -> tuple[float, int, int, bool]:
        first = lane.first()
        if first is None:
            return math.inf, number, lane.version, False
        last = lane.last() or first
        of_first, of_last = self._value(number, first), self._value(number, last)
        return min(of_first, of_last), number, lane.version, of_last < of_first

    def _value(self, number: int, entry: Entry) -> float:
        kind, level = divmod(number, _LEVELS)
        age = self._model.now - entry.rank.priority
        return self._model.value[kind][age_bucket(age)] * 2.0 ** (level - _OCTAVES)


def _level(share: float) -> int:
    ratio = max(share / _AVERAGE_SHARE, 2.0**-_OCTAVES)
    return min(round(math.log2(ratio)), _OCTAVES) + _OCTAVES
