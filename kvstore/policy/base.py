"""What an eviction policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from kvstore.tiers.base import ChunkStats


class EvictionPolicy(ABC):
    """Ranks chunks of one tier; the lowest priority leaves first. One instance a tier; not thread-safe."""

    name: ClassVar[str]

    @abstractmethod
    def priority(self, stats: ChunkStats) -> float:
        """Rank of a chunk that was just stored or used; kept until its next use."""

    def on_evict(self, priority: float) -> None:
        """Told the priority of each chunk that left for want of room."""
        return
