"""When a chunk will be used again, learned from what was: reuse rates by class and age, and what they are worth.

The value of keeping a chunk is its Gittins index: over the best horizon, expected uses per second of room taken
(Gittins 1979; for caches compare LHD, Beckmann et al., NSDI'18). Reuse rates come from a survival table: of the chunks
of a class that got to an age unused, how many were used then. Chunks that left the cache are followed too, or the
table would never see a gap longer than the cache's own memory.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.policy.base import Chunk

#: Age buckets: below 1 s, then four to the octave up to 12 days.
_PER_OCTAVE = 4
BUCKETS = 20 * _PER_OCTAVE

#: Chunks followed, in the cache or not; one takes about 250 bytes.
MEMORY_CHUNKS = 2**18

_KINDS, _FRESH, _WARMTH = 5, 6, 4
_FRESH_STEPS = (2, 5, 12, 24, 48)  # chunks
CLASSES = _KINDS * _FRESH * _WARMTH
_TAIL = _KINDS - 1  # kind of a partial chunk, which ends a prompt; the others are by number of uses

#: Chunk uses between two looks at the table (fewer at the start), and between two halvings of it.
_REFRESH_USES = 4096
_HALVE_USES = 2**20

#: Weights of the priors, in uses: of the guess on all, of all on a kind, of a kind on a class.
_PRIOR_USES = (1.0, 3.0, 5.0)


class Seen:
    """What is remembered of one chunk. ``slot``: its place in the model's arrays."""

    __slots__ = ("cls", "last", "slot", "uses", "warmth")

    def __init__(self, slot: int, last: float, warmth: int) -> None:
        self.slot = slot
        self.uses = 0
        self.last = last
        self.warmth = warmth
        self.cls = 0


class ReuseModel:
    """Deterministic; not thread-safe. Times are seconds of the clock of ``ChunkStats``.

    ``now`` is the time of the last observed request, ``version`` counts the looks at the table, and ``value`` is the
    table of indexes, ``[CLASSES][BUCKETS]``, in uses a second. Without any knowledge the value falls with age alone:
    LRU.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.version = 0
        self._whole = 1  # tokens of a whole chunk, as far as seen
        self._seen: dict[Hashable, Seen] = {}
        # Last use and class of every chunk that is followed, for numpy; a slot that is forgotten is used again.
        self._last, self._classes = array("d"), array("h")
        # Gaps that ended: by use, or all, in the bucket in which they ended, and the time spent in that bucket.
        self._used = [[0.0] * BUCKETS for _ in range(CLASSES)]
        self._ended = [[0.0] * BUCKETS for _ in range(CLASSES)]
        self._partly = [[0.0] * BUCKETS for _ in range(CLASSES)]
        self._uses = 0
        self._next_refresh = _REFRESH_USES // 8
        self._next_halving = _HALVE_USES
        self.value: list[list[float]] = self._indexes()

    def observe(self, chain: Sequence[Chunk], now: float) -> None:
        """Learn from a request that used these chunks, first chunk first."""
        self.now = max(self.now, now)
        known = 0
        while known < len(chain) and (chain[known].key in self._seen or chain[known].stats.accesses > 1):
            known += 1
        fresh = _fresh_level(len(chain) - known)
        warmth = self._warmth(chain, known)
        for chunk in reversed(chain):
            self._use(chunk, fresh, warmth)
        self._uses += len(chain)
        if self._uses >= self._next_refresh:
            self._refresh()

    def class_of(self, chunk: Chunk) -> int:
        seen = self._seen.get(chunk.key)
        if seen is not None:
            return seen.cls
        return _class(self._kind(chunk, chunk.stats.accesses), 0, 0)

    def _kind(self, chunk: Chunk, uses: int) -> int:
        if chunk.n_tokens < self._whole:
            return _TAIL
        return 0 if uses <= 1 else 1 if uses == 2 else 2 if uses <= 4 else 3

    def _warmth(self, chain: Sequence[Chunk], known: int) -> int:
        """How well known the prefix is that a request's new chunks follow: 0 not at all, 3 often used.

        One popular chunk at the very start says nothing: it is the system prompt that everybody has.
        """
        if not known:
            return 0
        chunk = chain[known - 1]
        seen = self._seen.get(chunk.key)
        uses = seen.uses if seen is not None else chunk.stats.accesses - 1
        if uses > 8:
            return 3 if known > 1 else 0
        return 2 if uses > 1 else 1

    def _use(self, chunk: Chunk, fresh: int, warmth: int) -> None:
        self._whole = max(self._whole, chunk.n_tokens)
        seen = self._seen.pop(chunk.key, None)
        if seen is None:
            seen = Seen(self._slot(), self.now, warmth)
        else:
            self._used[seen.cls][self._end_gap(seen)] += 1.0
        self._seen[chunk.key] = seen  # at the end: the longest unused are forgotten first
        seen.uses = max(seen.uses + 1, chunk.stats.accesses)
        seen.last = self._last[seen.slot] = self.now
        seen.cls = self._classes[seen.slot] = _class(self._kind(chunk, seen.uses), fresh, seen.warmth)

    def _slot(self) -> int:
        if len(self._seen) < MEMORY_CHUNKS:
            self._last.append(0.0)
            self._classes.append(0)
            return len(self._last) - 1
        forgotten = self._seen.pop(next(iter(self._seen)))
        self._end_gap(forgotten)
        return forgotten.slot

    def _end_gap(self, seen: Seen) -> int:
        age = self.now - seen.last
        bucket = age_bucket(age)
        self._ended[seen.cls][bucket] += 1.0
        self._partly[seen.cls][bucket] += age - _START_LIST[bucket]
        return bucket

    def _refresh(self) -> None:
        self._next_refresh = self._uses + min(_REFRESH_USES, max(_REFRESH_USES // 8, self._uses // 4))
        if self._uses >= self._next_halving:
            self._next_halving += _HALVE_USES
            for table in (self._used, self._ended, self._partly):
                for row in table:
                    row[:] = [number / 2 for number in row]
        self.value = self._indexes()
        self.version += 1

    def _indexes(self) -> list[list[float]]:
        """Rates from the gaps that ended and those that still run, of chunks in the cache or not."""
        ages = np.maximum(self.now - np.frombuffer(self._last), 0.0)
        buckets = np.searchsorted(_STARTS, ages, side="right") - 1
        cells = np.frombuffer(self._classes, np.int16).astype(np.int64) * BUCKETS + buckets
        shape = (CLASSES, BUCKETS)
        ended = np.array(self._ended) + np.bincount(cells, minlength=CLASSES * BUCKETS).reshape(shape)
        partly = np.bincount(cells, ages - _STARTS[buckets], CLASSES * BUCKETS).reshape(shape)
        beyond = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended  # gaps that got past each bucket
        exposure = np.array(self._partly) + partly + beyond * _WIDTHS
        indexes: list[list[float]] = gittins(_rates(np.array(self._used), exposure)).tolist()
        return indexes


def age_bucket(age: float) -> int:
    """Bucket of an age in seconds."""
    return 0 if age < 1.0 else min(1 + int(_PER_OCTAVE * math.log2(age)), BUCKETS - 1)


def gittins(rates: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Largest ratio of expected uses to expected room over all horizons, for a chunk at the start of each bucket.

    Args:
        rates: reuse rates, ``[classes, buckets]``, 1/s.

    Returns:
        ``[classes, buckets]``, 1/s. A chunk counts as kept until its next use or the horizon.
    """
    passed = np.exp(-rates * _WIDTHS)  # chance to get through a bucket unused
    alive = np.cumprod(np.pad(passed, ((0, 0), (1, 0)), constant_values=1.0), axis=1)[:, :-1]
    alive = np.maximum(alive, 1e-200)
    uses = np.pad(np.cumsum(alive * (1.0 - passed), axis=1), ((0, 0), (1, 0)))
    room = np.pad(np.cumsum(alive * (1.0 - passed) / rates, axis=1), ((0, 0), (1, 0)))
    best = np.zeros_like(rates)
    for at in range(rates.shape[1]):
        gained, taken = uses[:, at + 1 :] - uses[:, at : at + 1], room[:, at + 1 :] - room[:, at : at + 1]
        best[:, at] = (gained / np.maximum(taken, 1e-200)).max(axis=1)
    return best


def _rates(used: npt.NDArray[np.float64], exposure: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Reuse rates, 1/s, each level with the one above as its prior: a guess, all chunks, a kind, a class."""
    groups = used.reshape(_KINDS, -1, BUCKETS), exposure.reshape(_KINDS, -1, BUCKETS)
    guess = 0.01 / (_STARTS + 20.0)  # falls with age
    everything = _posterior(used.sum(0), exposure.sum(0), guess, _PRIOR_USES[0])
    kind = _posterior(groups[0].sum(1), groups[1].sum(1), everything, _PRIOR_USES[1])
    return _posterior(groups[0], groups[1], kind[:, None, :], _PRIOR_USES[2]).reshape(CLASSES, BUCKETS)


def _posterior(
    used: npt.NDArray[np.float64], exposure: npt.NDArray[np.float64], prior: npt.NDArray[np.float64], weight: float
) -> npt.NDArray[np.float64]:
    rates: npt.NDArray[np.float64] = (used + weight) / (exposure + weight / prior)
    return rates


def _class(kind: int, fresh: int, warmth: int) -> int:
    return (kind * _FRESH + fresh) * _WARMTH + warmth


def _fresh_level(n_chunks: int) -> int:
    """How much of a request was new."""
    return bisect.bisect_right(_FRESH_STEPS, n_chunks)


_STARTS = np.array([0.0, *(2.0 ** (b / _PER_OCTAVE) for b in range(BUCKETS - 1))])
_START_LIST: list[float] = _STARTS.tolist()
_WIDTHS = np.diff(np.append(_STARTS, 2.0 ** ((BUCKETS - 1) / _PER_OCTAVE)))
