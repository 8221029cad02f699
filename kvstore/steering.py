"""Looking into the cache and steering it by hand: match, explain, overview, pin, unpin, forget."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.ghosts import Departure, Ghosts
from kvstore.index import Node, Path, PrefixIndex
from kvstore.keys import TOKEN_BYTES, chunk_key, decode_tokens, encode_tokens, root_key
from kvstore.layout import KVLayout
from kvstore.pins import Pins
from kvstore.tiers.base import TierName
from kvstore.transfer import Transfer

#: Pinned chunks may take this share of the largest tier: the rest must go on serving everybody else.
MAX_PINNED_SHARE = 0.5


class PinLimitExceeded(Exception):
    """Pinning this prefix would leave too little room for what isn't pinned."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a lookup would find, in tokens by the fastest tier that has them."""

    n_tokens: int
    tiers: dict[TierName, int]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prompt hits as far as it does, and no further."""

    match: Match
    continuation: list[int] | None  # ids that the closest cached prompt has from the first uncached token on
    departed: Departure | None  # the next chunk of this prompt was cached until then


@dataclass(slots=True)
class PrefixSummary:
    """One cached prefix family: everything below one first chunk."""

    first_tokens: list[int]  # for a preview
    chunks: int = 0
    tokens: int = 0
    tiers: dict[TierName, int] = field(default_factory=dict)  # tokens with a copy on the tier
    accesses: int = 0
    last_access: float = 0.0
    pinned_until: float | None = None  # the latest; inf = until unpinned


class Steering:
    """What operators and explainers do with a store. Shares the store's lock; parts of ``PrefixStore``."""

    def __init__(
        self,
        layout: KVLayout,
        identity: bytes,
        index: PrefixIndex,
        transfer: Transfer,
        pins: Pins,
        ghosts: Ghosts,
        lock: threading.RLock,
    ) -> None:
        self._layout = layout
        self._identity = identity
        self._index = index
        self._transfer = transfer
        self._pins = pins
        self._ghosts = ghosts
        self._lock = lock

    def match(self, token_ids: Sequence[int], namespace: str) -> Match:
        with self._lock:
            return _match_of(self._walk(token_ids, namespace))

    def explain(self, token_ids: Sequence[int], namespace: str) -> Explanation:
        with self._lock:
            path = self._walk(token_ids, namespace)
            rest = encode_tokens(token_ids)[path.n_tokens * TOKEN_BYTES :]
            if not rest:
                return Explanation(_match_of(path), None, None)
            return Explanation(
                _match_of(path),
                self._continuation(path, root_key(self._identity, namespace)),
                self._departure(path, token_ids, namespace),
            )

    def overview(self, namespace: str) -> list[PrefixSummary]:
        """The cached prefixes of a namespace, most recently used first."""
        with self._lock:
            roots = self._index.children_of(root_key(self._identity, namespace), None)
            return sorted((self._summary(node) for node in roots), key=lambda s: -s.last_access)

    def pin(self, token_ids: Sequence[int], namespace: str, ttl: float | None) -> int:
        with self._lock:
            chunks = _pinnable(self._walk(token_ids, namespace))
            self._check_pin_limit(chunks)
            self._pins.set(chunks, ttl)
            return sum(node.n_tokens for node in chunks)

    def unpin(self, token_ids: Sequence[int], namespace: str) -> int:
        with self._lock:
            path = self._walk(token_ids, namespace)
            rest = encode_tokens(token_ids)[sum(node.n_tokens for node in path.nodes) * TOKEN_BYTES :]
            last = path.nodes[-1] if path.nodes else None
            siblings = self._index.children_of(root_key(self._identity, namespace), last)
            tails = [n for n in siblings if n.pins and rest.startswith(self._index.tokens_of(n) or b"\xff")]
            ended = [node for node in [*path.nodes[-1:], *tails] if self._pins.remove(node.key)]
            return (
                sum(node.n_tokens for node in path.nodes) + max((n.n_tokens for n in tails), default=0) if ended else 0
            )

    def forget(self, token_ids: Sequence[int], namespace: str) -> int:
        with self._lock:
            path = self._walk(token_ids, namespace)
            rest = encode_tokens(token_ids)[sum(node.n_tokens for node in path.nodes) * TOKEN_BYTES :]
            last = path.nodes[-1] if path.nodes else None
            if path.partial is not None and path.partial_tokens in (path.partial.n_tokens, len(rest) // TOKEN_BYTES):
                last = path.partial
            elif rest:
                last = None
            return self._transfer.drop_subtree(last, reason="forgotten") if last is not None else 0

    def _walk(self, token_ids: Sequence[int], namespace: str) -> Path:
        self._pins.expire()
        return self._index.walk(root_key(self._identity, namespace), encode_tokens(token_ids))

    def _continuation(self, path: Path, root: bytes) -> list[int] | None:
        """What the closest cached prompt goes on with: that of the partly matched chunk, else of the last used one."""
        node, skip = path.partial, path.partial_tokens
        if node is None:
            siblings = self._index.children_of(root, path.nodes[-1] if path.nodes else None)
            node, skip = max(siblings, key=lambda n: n.stats.last_access, default=None), 0
        tokens = self._index.tokens_of(node) if node is not None else None
        if tokens is None or len(tokens) <= skip * TOKEN_BYTES:
            return None
        ids: list[int] = decode_tokens(tokens[skip * TOKEN_BYTES :]).tolist()
        return ids

    def _departure(self, path: Path, token_ids: Sequence[int], namespace: str) -> Departure | None:
        at = sum(node.n_tokens for node in path.nodes)
        parent = path.nodes[-1].key if path.nodes else root_key(self._identity, namespace)
        piece = encode_tokens(token_ids[at : at + self._layout.chunk_size])
        return self._ghosts.get(chunk_key(parent, piece))

    def _summary(self, first: Node) -> PrefixSummary:
        tokens = self._index.tokens_of(first)
        summary = PrefixSummary(decode_tokens(tokens).tolist() if tokens is not None else [])
        waiting = [first]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children)
            summary.chunks += 1
            summary.tokens += node.n_tokens
            summary.accesses = max(summary.accesses, node.stats.accesses)
            summary.last_access = max(summary.last_access, node.stats.last_access)
            for tier in node.tiers:
                summary.tiers[tier] = summary.tiers.get(tier, 0) + node.n_tokens
            for end in node.pins:
                until = self._pins.expiry(end)
                summary.pinned_until = max(filter(None, (summary.pinned_until, until)), default=None)
        return summary

    def _check_pin_limit(self, chunks: list[Node]) -> None:
        pinned = {node.key for node in self._index if node.pins} if len(self._pins) else set()
        total = (len(pinned) + sum(node.key not in pinned for node in chunks)) * self._layout.chunk_bytes
        limit = int(self._transfer.largest_capacity() * MAX_PINNED_SHARE)
        if total > limit:
            raise PinLimitExceeded(
                f"pinned prefixes would take {total} bytes, and {limit} bytes ({MAX_PINNED_SHARE:.0%} of the largest "
                "tier) may be pinned; unpin others, or give the largest tier more room"
            )


def _match_of(path: Path) -> Match:
    tiers: dict[TierName, int] = {}
    parts = [(node, node.n_tokens) for node in path.nodes]
    if path.partial is not None:
        parts.append((path.partial, path.partial_tokens))
    for node, n_tokens in parts:
        tier = next(t for t in TierName if t in node.tiers or node.busy)
        tiers[tier] = tiers.get(tier, 0) + n_tokens
    return Match(path.n_tokens, tiers)


def _pinnable(path: Path) -> list[Node]:
    """The chunks that hold the prefix: whole ones, and the tail when all of it is shared with a cached one."""
    tail = [path.partial] if path.partial is not None and path.partial_tokens == path.partial.n_tokens else []
    return [*path.nodes, *tail]
