"""What was here until lately: so that a miss can be told apart from an eviction."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvstore.tiers.base import TierName

#: 16-byte keys and a few words each: about 2 MiB in all.
MAX_GHOSTS = 16_384


@dataclass(frozen=True, slots=True)
class Departure:
    """The last copy of a chunk left the cache: when (seconds of the store's clock), from which tier, and why."""

    at: float
    tier: TierName
    reason: str


class Ghosts:
    """Keys of chunks that left lately, newest last, bounded. Not thread-safe: the store locks."""

    def __init__(self, limit: int = MAX_GHOSTS) -> None:
        self._limit = limit
        self._departures: OrderedDict[bytes, Departure] = OrderedDict()

    def __len__(self) -> int:
        return len(self._departures)

    def add(self, key: bytes, departure: Departure) -> None:
        self._departures[key] = departure
        self._departures.move_to_end(key)
        if len(self._departures) > self._limit:
            self._departures.popitem(last=False)

    def get(self, key: bytes) -> Departure | None:
        return self._departures.get(key)

    def discard(self, key: bytes) -> None:
        """The chunk is back."""
        self._departures.pop(key, None)
