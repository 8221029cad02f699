"""Who leaves a tier next: lanes of ranked chunks, leaves first, brought up to date lazily."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from kvstore.policy.base import Chunk, EvictionPolicy, Rank

log = logging.getLogger(__name__)

C = TypeVar("C", bound=Chunk)


class QueueEntry(Generic[C]):
    """A chunk with its rank. ``listed``: its lane may hand it out."""

    __slots__ = ("chunk", "listed", "order", "rank")

    def __init__(self, chunk: C, rank: Rank, order: int) -> None:
        self.chunk = chunk
        self.rank = rank
        self.order = order
        self.listed = False


class QueueLane(Generic[C]):
    """A heap from each end (the upper one only if asked for). Entries that are no longer listed are skipped when they
    surface, and a heap is rebuilt when they outnumber the others."""

    __slots__ = ("_changed", "_down", "_listed", "_number", "_two_ended", "_up", "size", "version")

    def __init__(self, number: int, two_ended: bool, changed: set[int]) -> None:
        self._number = number
        self._changed = changed
        self.size = 0
        self.version = 0
        self._listed = 0
        self._two_ended = two_ended
        self._up: list[tuple[float, int, QueueEntry[C]]] = []
        self._down: list[tuple[float, int, QueueEntry[C]]] = []

    def first(self) -> QueueEntry[C] | None:
        return self._top(self._up)

    def last(self) -> QueueEntry[C] | None:
        return self._top(self._down)

    def put(self, entry: QueueEntry[C]) -> None:
        entry.listed = True
        self._listed += 1
        self._note()
        self._up = self._push(self._up, entry, 1)
        if self._two_ended:
            self._down = self._push(self._down, entry, -1)

    def unlist(self, entry: QueueEntry[C]) -> None:
        if entry.listed:
            entry.listed = False
            self._listed -= 1
            self._note()

    def _note(self) -> None:
        self.version += 1
        self._changed.add(self._number)

    def _push(
        self, heap: list[tuple[float, int, QueueEntry[C]]], entry: QueueEntry[C], sign: int
    ) -> list[tuple[float, int, QueueEntry[C]]]:
        if len(heap) > 2 * self._listed + 64:
            heap = [item for item in heap if item[2].listed]
            heapq.heapify(heap)
        heapq.heappush(heap, (sign * entry.rank.priority, sign * entry.order, entry))
        return heap

    @staticmethod
    def _top(heap: list[tuple[float, int, QueueEntry[C]]]) -> QueueEntry[C] | None:
        while heap and not heap[0][2].listed:
            heapq.heappop(heap)
        return heap[0][2] if heap else None


class EvictionQueue(Generic[C]):
    """The chunks of one tier in the order of a policy. Not thread-safe: the store locks.

    Prefix-closed under every policy: a chunk with a child in the queue is in no lane's heap, whatever its rank, and
    comes in when the last child has left.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._lanes: dict[int, QueueLane[C]] = {}
        self._entries: dict[Hashable, QueueEntry[C]] = {}
        self._children: dict[Hashable, int] = {}  # by parent key: how many children are in the queue
        self._changed: set[int] = set()  # lanes whose leaves changed since the policy looked
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def observe(self, chain: Sequence[C], now: float) -> None:
        """Tell the policy which chunks a request used, first chunk first; before they are touched again."""
        self._policy.observe(chain, now)

    def touch(self, chunk: C) -> None:
        """Rank a chunk that was stored in the tier or used."""
        entry = self._entries.get(chunk.key)
        if entry is not None:
            self._leave_lane(entry)
        elif chunk.parent is not None:
            key = chunk.parent.key
            self._children[key] = self._children.get(key, 0) + 1
        self._enter(chunk, self._policy.rank(chunk))

    def discard(self, chunk: C) -> None:
        entry = self._entries.get(chunk.key)
        if entry is not None:
            self._remove(entry)

    def pop(self, may_leave: Callable[[C], bool]) -> C | None:
        """Take out the chunk that should leave first of those that may; None when none may."""
        passed: list[QueueEntry[C]] = []
        found: C | None = None
        while found is None:
            picked = self._policy.pick(self._lanes, self._changed)
            if picked is None:
                break
            entry = self._entries[picked.chunk.key]
            if entry.chunk.key in self._children:
                self._lanes[entry.rank.lane].unlist(entry)  # until its last child leaves
            elif not may_leave(entry.chunk):
                self._lanes[entry.rank.lane].unlist(entry)
                passed.append(entry)
            elif (rank := self._policy.spare(entry)) is not None:
                self._leave_lane(entry)
                self._enter(entry.chunk, rank)
            else:
                self._remove(entry)
                self._policy.on_evict(entry)
                _log_decision(self._policy.name, entry)
                found = entry.chunk
        for entry in passed:
            self._list(entry)
        return found

    def _enter(self, chunk: C, rank: Rank) -> None:
        entry = QueueEntry(chunk, rank, next(self._order))
        self._entries[chunk.key] = entry
        lane = self._lanes.get(rank.lane)
        if lane is None:
            lane = self._lanes[rank.lane] = QueueLane(rank.lane, self._policy.two_ended, self._changed)
        lane.size += 1
        self._list(entry)

    def _list(self, entry: QueueEntry[C]) -> None:
        if not entry.listed and entry.chunk.key not in self._children:
            self._lanes[entry.rank.lane].put(entry)

    def _leave_lane(self, entry: QueueEntry[C]) -> None:
        lane = self._lanes[entry.rank.lane]
        lane.unlist(entry)
        lane.size -= 1

    def _remove(self, entry: QueueEntry[C]) -> None:
        self._leave_lane(entry)
        del self._entries[entry.chunk.key]
        if entry.chunk.parent is None:
            return
        key = entry.chunk.parent.key
        self._children[key] -= 1
        if not self._children[key]:
            del self._children[key]
            parent = self._entries.get(key)
            if parent is not None:
                self._list(parent)


def _log_decision(policy: str, entry: QueueEntry[C]) -> None:
    if log.isEnabledFor(logging.DEBUG):
        key, stats, rank = entry.chunk.key, entry.chunk.stats, entry.rank
        log.debug(
            "chunk %s leaves: policy=%s lane=%d score=%.6g accesses=%d importance=%.3f",
            key.hex()[:12] if isinstance(key, bytes) else key,
            policy,
            rank.lane,
            rank.priority,
            stats.accesses,
            stats.important_share,
        )
