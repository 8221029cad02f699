"""What an eviction policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

from kvstore.tiers.base import ChunkStats


class Chunk(Protocol):
    """What a policy sees of a chunk: a node of the store's tree, or a block of a replayed trace."""

    @property
    def key(self) -> Hashable: ...
    @property
    def parent(self) -> Chunk | None: ...
    @property
    def stats(self) -> ChunkStats: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def depth(self) -> int: ...


class Rank(NamedTuple):
    """Where a chunk stands. Within a lane the lowest priority leaves first; the policy picks between lanes."""

    lane: int
    priority: float


class Entry(Protocol):
    """A ranked chunk, as the queue hands it to a policy."""

    @property
    def chunk(self) -> Chunk: ...
    @property
    def rank(self) -> Rank: ...


class Lane(Protocol):
    """Chunks of one lane. ``size`` counts all of them; ``first`` and ``last`` see the leaves, and ``version`` changes
    with every leaf that comes or goes."""

    size: int
    version: int

    def first(self) -> Entry | None: ...
    def last(self) -> Entry | None: ...


class EvictionPolicy(ABC):
    """Ranks chunks of one tier. One instance a tier; not thread-safe.

    The queue keeps every order prefix-closed: a chunk is looked at only when no child of it is in the queue. So a
    policy never needs to think of parents and children.
    """

    name: ClassVar[str]
    two_ended: ClassVar[bool] = False  # whether ``pick`` asks for ``Lane.last``

    @abstractmethod
    def rank(self, chunk: Chunk) -> Rank:
        """Rank of a chunk that was just stored or used; kept until its next use."""

    def observe(self, chain: Sequence[Chunk], now: float) -> None:
        """Told the chunks of each request, first chunk first, when it is done and before they are ranked.

        ``now`` is in seconds of the clock of ``ChunkStats``.
        """
        return

    def pick(self, lanes: Mapping[int, Lane], changed: set[int]) -> Entry | None:
        """The chunk that should leave next; None when no lane has one.

        ``changed`` holds the lanes whose leaves changed; who looks at it empties it.
        """
        for lane in sorted(lanes):
            entry = lanes[lane].first()
            if entry is not None:
                return entry
        return None

    def spare(self, entry: Entry) -> Rank | None:
        """A second chance: a new rank for a chunk that is about to leave; None lets it go."""
        return None

    def on_evict(self, entry: Entry) -> None:
        """Told of each chunk that left for want of room."""
        return

    def sibling(self) -> EvictionPolicy:
        """A policy of the same kind for another tier; it may share what this one learns from ``observe``."""
        return type(self)()
