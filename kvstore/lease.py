"""A running request's hold on the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.index import Node
from kvstore.tiers.base import TierName


@dataclass(eq=False, slots=True)
class Lease:
    """Pages of one sequence, and the cached chunks it keeps from being evicted. Made by ``PrefixStore.begin``.

    ``pages[i]`` holds tokens ``[i * chunk_size, (i + 1) * chunk_size)``. After ``load``, the KV of the first
    ``hit_tokens`` tokens is there, and ``hits`` says from which tiers it came.
    """

    root: bytes  # namespace root key
    caching: bool  # False: nothing is looked up or kept
    looked_up: int  # tokens of the prompt
    counted: bool = True  # in the hit statistics
    tokens: bytes = b""  # of the looked-up prompt
    nodes: list[Node] = field(default_factory=list)  # leased whole chunks, in order
    partial: Node | None = None
    partial_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    private: set[int] = field(default_factory=set)  # indexes into pages that no node owns
    hits: dict[TierName, int] = field(default_factory=dict)
    below_device: int = 0  # tokens of the hit that no page held at the lookup
    published: int = 0  # whole chunks known to the tree (or given up on)
    open: bool = True

    @property
    def hit_tokens(self) -> int:
        return sum(self.hits.values())

    def count(self, tier: TierName, n_tokens: int) -> None:
        self.hits[tier] = self.hits.get(tier, 0) + n_tokens
