"""Who leaves a tier next: a heap of priorities, brought up to date lazily."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from kvstore.index import Node
from kvstore.policy import EvictionPolicy


class EvictionQueue:
    """The chunks of one tier in order of priority. Not thread-safe: the store locks.

    A touch pushes a new entry and makes the older one stale; stale entries are skipped when they surface, and the heap
    is rebuilt when they outnumber the live ones.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[float, int, Node]] = []
        self._current: dict[bytes, tuple[int, float]] = {}
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._current)

    def touch(self, node: Node) -> None:
        """Rank a chunk that was stored in the tier or used."""
        order, priority = next(self._order), self._policy.priority(node.stats)
        self._current[node.key] = (order, priority)
        heapq.heappush(self._heap, (priority, order, node))
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        self._current.pop(node.key, None)

    def pop(self, may_leave: Callable[[Node], bool]) -> Node | None:
        """Take out the lowest chunk that may leave; None when none may."""
        passed: list[tuple[float, int, Node]] = []
        found: Node | None = None
        while self._heap:
            entry = heapq.heappop(self._heap)
            if not self._is_current(entry):
                continue
            if may_leave(entry[2]):
                found = entry[2]
                del self._current[found.key]
                self._policy.on_evict(entry[0])
                break
            passed.append(entry)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def _is_current(self, entry: tuple[float, int, Node]) -> bool:
        known = self._current.get(entry[2].key)
        return known is not None and known[0] == entry[1]
