"""Pins: prefixes that must stay cached, until a time or until they are unpinned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from kvstore.index import Node, PrefixIndex


class Pins:
    """Which prefixes are pinned and until when, by the key of their last chunk. Not thread-safe: the store locks.

    A chunk carries the ends of all pinned prefixes it belongs to (``Node.pins``), so that two prefixes with a common
    head can be unpinned one by one.

    Args:
        index: the prefix tree.
        clock: the store's clock, seconds.
    """

    def __init__(self, index: PrefixIndex, clock: Callable[[], float]) -> None:
        self._index = index
        self._clock = clock
        self._expiry: dict[bytes, float] = {}
        self._next = math.inf

    def __len__(self) -> int:
        return len(self._expiry)

    def set(self, nodes: Iterable[Node], ttl: float | None) -> None:
        """Pin a prefix, given as its chunks in order; pinning it again sets its time anew."""
        chunks = list(nodes)
        if chunks:
            end = chunks[-1].key
            self._expiry[end] = math.inf if ttl is None else self._clock() + ttl
            self._next = min(self._expiry.values())
            for node in chunks:
                node.pins.add(end)

    def remove(self, end: bytes) -> bool:
        """End the pin of the prefix that ends with this chunk; False when there is none."""
        if self._expiry.pop(end, None) is None:
            return False
        self._next = min(self._expiry.values(), default=math.inf)
        node = self._index.get(end)
        while node is not None:
            node.pins.discard(end)
            node = node.parent
        return True

    def expire(self) -> bool:
        """End the pins whose time has come; True when there were any. Cheap when there are none."""
        now = self._clock()
        if self._next > now:
            return False
        for end in [end for end, expiry in self._expiry.items() if expiry <= now]:
            self.remove(end)
        return True

    def forget(self, node: Node) -> None:
        """The chunk is gone: no pin that it belonged to can hold any longer."""
        for end in list(node.pins):
            self.remove(end)

    def expiry(self, end: bytes) -> float | None:
        """When the pin of this prefix ends, in the clock's seconds (``inf``: never); None when it isn't pinned."""
        return self._expiry.get(end)

    def snapshot(self) -> dict[bytes, float]:
        return dict(self._expiry)

    def restore(self, saved: Mapping[bytes, float]) -> None:
        """Pin again what an earlier process had pinned, as far as it is still cached."""
        for end, expiry in saved.items():
            node = self._index.get(end)
            if node is None or expiry <= self._clock():
                continue
            self._expiry[end] = expiry
            while node is not None:
                node.pins.add(end)
                node = node.parent
        self._next = min(self._expiry.values(), default=math.inf)
