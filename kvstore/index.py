"""The prefix tree: which chunks there are, how they hang together, and the longest cached prefix of a prompt."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvstore.keys import TOKEN_BYTES, chunk_key
from kvstore.tiers.base import ChunkRecord, ChunkStats, TierName


@dataclass(eq=False, slots=True)
class Node:
    """One cached chunk; in the tree as long as some tier holds it, or it is on the way between tiers."""

    record: ChunkRecord
    tokens: bytes | None  # little-endian int32 ids; None until read from disk
    parent: Node | None  # None for the first chunk of a prefix
    stats: ChunkStats
    tiers: set[TierName] = field(default_factory=set)
    page: int | None = None  # arena page while on the device tier
    leases: int = 0  # running requests that use it
    pins: set[bytes] = field(default_factory=set)  # keys of the pinned prefixes' last chunks
    busy: threading.Event | None = None  # set when a copy of this chunk between tiers is done
    children: Family = field(default_factory=lambda: Family())

    @property
    def key(self) -> bytes:
        return self.record.key

    @property
    def n_tokens(self) -> int:
        return self.record.n_tokens

    @property
    def depth(self) -> int:
        return self.record.depth

    @property
    def held(self) -> bool:
        """Must stay where it is."""
        return bool(self.leases or self.pins or self.busy)


class Family:
    """The children of one node, sorted by token bytes once those are known."""

    def __init__(self) -> None:
        self._members: dict[bytes, Node] = {}
        self._sorted: list[tuple[bytes, bytes]] = []  # token bytes, key
        self._unread: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._members.values()))

    def add(self, node: Node) -> None:
        self._members[node.key] = node
        if node.tokens is None:
            self._unread.add(node.key)
        else:
            bisect.insort(self._sorted, (node.tokens, node.key))

    def remove(self, node: Node) -> None:
        del self._members[node.key]
        if node.key in self._unread:
            self._unread.discard(node.key)
        elif node.tokens is not None:
            del self._sorted[bisect.bisect_left(self._sorted, (node.tokens, node.key))]

    def closest(self, tokens: bytes, read: Callable[[Node], bytes | None]) -> tuple[Node, int] | None:
        """The child that shares the most leading tokens with ``tokens``, and how many; None when none shares any.

        Among byte strings in order, the longest common prefix is that of a neighbour.
        """
        for key in list(self._unread):
            node = self._members[key]
            node.tokens = read(node)
            if node.tokens is not None:
                self._unread.discard(key)
                bisect.insort(self._sorted, (node.tokens, key))
        at = bisect.bisect_left(self._sorted, (tokens, b""))
        best: tuple[Node, int] | None = None
        for found, key in self._sorted[max(0, at - 1) : at + 1]:
            shared = common_tokens(found, tokens)
            if shared and (best is None or shared > best[1]):
                best = (self._members[key], shared)
        return best


@dataclass(frozen=True, slots=True)
class Path:
    """The longest cached prefix: whole chunks, then the first ``partial_tokens`` of one more."""

    nodes: list[Node]
    partial: Node | None
    partial_tokens: int

    @property
    def n_tokens(self) -> int:
        return sum(node.n_tokens for node in self.nodes) + self.partial_tokens


class PrefixIndex:
    """All nodes by key, and the first chunks of each namespace root. Not thread-safe: the store locks.

    Args:
        chunk_size: tokens of a whole chunk.
        read_tokens: brings the token bytes of a node that was found on disk at start.
    """

    def __init__(self, chunk_size: int, read_tokens: Callable[[Node], bytes | None]) -> None:
        self._chunk_size = chunk_size
        self._read_tokens = read_tokens
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Family] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._nodes.values()))

    def get(self, key: bytes) -> Node | None:
        return self._nodes.get(key)

    def family(self, root: bytes, parent: Node | None) -> Family:
        return parent.children if parent is not None else self._roots.setdefault(root, Family())

    def children_of(self, root: bytes, parent: Node | None) -> list[Node]:
        """The chunks that follow ``parent``, or the first ones of a namespace root. Creates nothing."""
        family = parent.children if parent is not None else self._roots.get(root)
        return list(family) if family is not None else []

    def add(self, node: Node) -> None:
        self._nodes[node.key] = node
        self.family(node.record.parent, node.parent).add(node)

    def remove(self, node: Node) -> None:
        del self._nodes[node.key]
        family = self.family(node.record.parent, node.parent)
        family.remove(node)
        if node.parent is None and not len(family):
            del self._roots[node.record.parent]

    def find(self, key: bytes, tokens: bytes) -> Node | None:
        """A node by key whose token ids are these; a hash is never trusted alone."""
        node = self._nodes.get(key)
        return node if node is not None and self.tokens_of(node) == tokens else None

    def tokens_of(self, node: Node) -> bytes | None:
        if node.tokens is None:
            family = self.family(node.record.parent, node.parent)
            tokens = self._read_tokens(node)
            if tokens is not None:
                family.remove(node)
                node.tokens = tokens
                family.add(node)
        return node.tokens

    def walk(self, root: bytes, tokens: bytes) -> Path:
        """Longest cached prefix of ``tokens`` under a namespace root."""
        step = self._chunk_size * TOKEN_BYTES
        nodes: list[Node] = []
        parent: Node | None = None
        at = 0
        while at + step <= len(tokens):
            piece = tokens[at : at + step]
            node = self.find(chunk_key(parent.key if parent else root, piece), piece)
            if node is None:
                break
            nodes.append(node)
            parent, at = node, at + step
        partial = self._partial(root, parent, tokens[at : at + step])
        return Path(nodes, *(partial or (None, 0)))

    def _partial(self, root: bytes, parent: Node | None, rest: bytes) -> tuple[Node, int] | None:
        if parent is None and root not in self._roots:
            return None
        if parent is not None and parent.n_tokens < self._chunk_size:
            return None
        return self.family(root, parent).closest(rest, self._read_tokens) if rest else None


def common_tokens(left: bytes, right: bytes) -> int:
    """How many leading token ids two encoded sequences share."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit // TOKEN_BYTES
    low, high = 0, limit  # the first differing byte lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low // TOKEN_BYTES
