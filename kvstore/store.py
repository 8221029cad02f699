"""PrefixStore: the cache of prefix KV over a device arena, host memory and disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from kvstore.eviction import EvictionQueue
from kvstore.ghosts import Departure, Ghosts
from kvstore.importance import IMPORTANT_FRACTION, fold, important_shares
from kvstore.index import Node, Path, PrefixIndex
from kvstore.keys import TOKEN_BYTES, chunk_key, encode_tokens, root_key
from kvstore.layout import KVLayout
from kvstore.lease import Lease
from kvstore.pins import Pins
from kvstore.planner import Part, Planner
from kvstore.policy import make_policy
from kvstore.stats import StoreCounters, StoreStats
from kvstore.steering import Explanation, Match, PrefixSummary, Steering
from kvstore.tiers.base import ChunkRecord, ChunkStats, Tier, TierName, TierUsage
from kvstore.tiers.device import DeviceArena
from kvstore.tiers.disk import DiskTier
from kvstore.transfer import Transfer
from kvstore.writer import DiskWriter

__all__ = ["Explanation", "Lease", "Match", "PrefixStore", "PrefixSummary"]

log = logging.getLogger(__name__)

#: A partial tail is kept only if it is this much longer than what is cached already at its place.
MIN_NEW_TAIL_TOKENS = 8

#: A disk that hangs must not keep the process from ending.
CLOSE_SECONDS = 30.0

_ORDER = {tier: rank for rank, tier in enumerate(TierName)}  # fastest first


class PrefixStore:
    """Thread-safe. One lock guards the tree and the accounting; bytes are copied outside it.

    Args:
        layout: geometry of the KV.
        identity: 32-byte digest of model, weights, dtype, tokenizer (``kvstore.identity``).
        arena: the device tier's pages; running sequences take theirs from it too.
        host, disk: lower tiers, or None.
        policy: config name of the eviction policy; each tier has its own instance.
        write_queue_chunks: chunks that may wait for the disk writer; further ones are dropped and counted.
        clock: wall-clock seconds, for recency that survives restarts.
    """

    def __init__(
        self,
        layout: KVLayout,
        identity: bytes,
        arena: DeviceArena,
        *,
        host: Tier | None = None,
        disk: DiskTier | None = None,
        policy: str = "importance_score",
        write_queue_chunks: int = 64,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._layout = layout
        self._identity = identity
        self._arena = arena
        self._host = host
        self._disk = disk
        self._clock = clock
        self._lock = threading.RLock()
        self._counters = StoreCounters()
        self._index = PrefixIndex(layout.chunk_size, self._read_tokens)
        ranking = make_policy(policy)
        self._queues: dict[TierName, EvictionQueue[Node]] = {
            tier: EvictionQueue(ranking if tier is TierName.GPU else ranking.sibling()) for tier in TierName
        }
        self.planner = Planner()
        self._ghosts = Ghosts()
        self._pins = Pins(self._index, clock)
        self._transfer = Transfer(
            layout, arena, host, disk, self._index, self._queues, self._counters, self._lock,
            self._drop_on_disk, self._departed, self.planner,
        )  # fmt: skip
        self._steering = Steering(layout, identity, self._index, self._transfer, self._pins, self._ghosts, self._lock)
        self._writer = DiskWriter(self._transfer, disk, write_queue_chunks) if disk is not None else None
        if disk is not None:
            self._rebuild(disk)

    # Requests -------------------------------------------------------------------------------------------------

    def begin(
        self,
        token_ids: Sequence[int],
        namespace: str = "",
        *,
        limit: int | None = None,
        use_cache: bool = True,
        whole_chunks: bool = False,
        counted: bool = True,
    ) -> Lease:
        """Look up the longest cached prefix and hold every chunk of it. Quick: nothing is copied.

        At most ``limit`` tokens hit, by default all but the last, whose logits are needed; with ``whole_chunks`` the
        hit ends where a whole chunk ends. Not ``counted``: it leaves the hit statistics alone.
        """
        n = len(token_ids)
        limit = n - 1 if limit is None else min(limit, n - 1)
        lease = Lease(root=root_key(self._identity, namespace), caching=use_cache, looked_up=n, counted=counted)
        with self._lock:
            self._expire_pins()
            self._counters.leases += 1
            if use_cache and limit > 0:
                lease.tokens = encode_tokens(token_ids)
                path = self._index.walk(lease.root, lease.tokens[: limit * TOKEN_BYTES])
                self._hold(lease, Path(path.nodes, None, 0) if whole_chunks else path)
        return lease

    def load(self, lease: Lease) -> None:
        """Bring the held chunks into arena pages. Blocking; call it from a thread that may wait for a disk.

        Chunks that fail verification, or for which there is no page, end the hit there: the rest is computed.
        """
        try:
            self._load_nodes(lease)
            if lease.partial is not None:
                if self._worth_loading(self._parts(lease)[-1:], lease):
                    self._load_partial(lease, lease.partial)
                else:
                    self._truncate(lease, len(lease.nodes))
        finally:
            self._account(lease)

    def reserve(self, lease: Lease, n_tokens: int) -> bool:
        """Make the page table cover ``n_tokens``; False, and nothing changed, when there is no room now."""
        needed = -(-n_tokens // self._layout.chunk_size)
        taken: list[int] = []
        while len(lease.pages) + len(taken) < needed:
            near = taken[-1] if taken else (lease.pages[-1] if lease.pages else None)
            page = self._transfer.take_page(near, self._pages_to_come(lease) - len(taken))
            if page is None:
                with self._lock:
                    for taken_page in taken:
                        self._arena.free(taken_page)
                return False
            taken.append(page)
        lease.private.update(range(len(lease.pages), len(lease.pages) + len(taken)))
        lease.pages.extend(taken)
        return True

    def publish(self, lease: Lease, token_ids: Sequence[int], n_computed: int, *, final: bool = False) -> None:
        """Make computed chunks usable by others. The KV of ``token_ids[:n_computed]`` in the lease's pages is exact.

        Whole chunks become nodes at once; with ``final`` the tail does too. A chunk that exists already is used in
        place of the lease's own page, which comes free.
        """
        if not (lease.caching and lease.open):
            return
        chunk = self._layout.chunk_size
        with self._lock:
            fresh: list[Node] = []
            while (lease.published + 1) * chunk <= n_computed:
                at = lease.published * chunk
                if not self._publish_chunk(lease, encode_tokens(token_ids[at : at + chunk]), fresh):
                    break
                lease.published += 1
            at = lease.published * chunk
            if final and 0 < n_computed - at < chunk:
                self._publish_tail(lease, encode_tokens(token_ids[at:n_computed]), fresh)
        for node in fresh:
            self._enqueue(node)

    def release(self, lease: Lease) -> None:
        """End the lease, whatever the ending; a second call does nothing."""
        with self._lock:
            if not lease.open:
                return
            lease.open = False
            self._counters.leases -= 1
            self._drop_partial(lease)
            for index in lease.private:
                self._arena.free(lease.pages[index])
            self._queues[TierName.GPU].observe(lease.nodes, self._clock())  # what is learned there is the others' too
            for node in reversed(lease.nodes):  # tail first: a parent is never older than its children
                self._let_go(node)
            lease.nodes, lease.pages, lease.private = [], [], set()

    def record_importance(self, lease: Lease, mass: torch.Tensor) -> None:
        """Fold measured attention mass of the prompt's tokens, ``[n]``, into the held chunks' important shares."""
        if not mass.numel():
            return
        shares = important_shares(mass, self._layout.chunk_size)
        with self._lock:
            for node, share in zip(lease.nodes, shares, strict=False):
                node.stats.important_share = fold(node.stats.important_share, share)

    # Looking and steering -------------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], namespace: str = "") -> Match:
        """What ``begin`` would find for these tokens, but for the last-token rule; changes nothing."""
        return self._steering.match(token_ids, namespace)

    def explain(self, token_ids: Sequence[int], namespace: str = "") -> Explanation:
        """How far these tokens hit, what the closest cached prompt has there, and whether the next chunk was here."""
        return self._steering.explain(token_ids, namespace)

    def overview(self, namespace: str = "") -> list[PrefixSummary]:
        """What is cached in a namespace, by first chunk, most recently used first."""
        return self._steering.overview(namespace)

    def pin(self, token_ids: Sequence[int], namespace: str = "", *, ttl: float | None = None) -> int:
        """Keep the cached chunks of a prefix somewhere in the cache, for ``ttl`` seconds or until unpinned.

        Returns their tokens; 0 when none of it is cached. Survives a restart when there is a disk tier. Raises
        PinLimitExceeded.
        """
        pinned = self._steering.pin(token_ids, namespace, ttl)
        self._save_pins()
        return pinned

    def unpin(self, token_ids: Sequence[int], namespace: str = "") -> int:
        """End a pin of the same prefix; chunks that another pin keeps stay. Returns its tokens, 0 for no such pin."""
        unpinned = self._steering.unpin(token_ids, namespace)
        self._save_pins()
        return unpinned

    def forget(self, token_ids: Sequence[int], namespace: str = "") -> int:
        """Drop what the cache holds of a prefix's end: its last chunk and all below it, unless in use or pinned.

        Chunks that merely share their first tokens with the prefix stay. Returns the tokens dropped.
        """
        return self._steering.forget(token_ids, namespace)

    def stats(self) -> StoreStats:
        with self._lock:
            counters, disk = self._counters, self._disk
            return StoreStats(
                lookups=counters.lookups,
                lookup_tokens=counters.lookup_tokens,
                hit_tokens={tier: counters.hit_tokens[tier] for tier in TierName},
                miss_tokens=counters.miss_tokens,
                evictions=dict(counters.evictions),
                promotions=dict(counters.promotions),
                demotions=dict(counters.demotions),
                dropped_stores=dict(counters.dropped_stores),
                planner_decisions=dict(counters.planner_decisions),
                integrity_failures=dict(counters.integrity_failures),
                usage=self._usage(),
                leases=counters.leases,
                pages_total=self._arena.n_pages,
                pages_free=self._arena.free_pages,
                disk_read_bytes=disk.read_bytes if disk else 0,
                disk_write_bytes=disk.write_bytes if disk else 0,
                disk_read_seconds=disk.read_seconds if disk else 0.0,
                disk_write_seconds=disk.write_seconds if disk else 0.0,
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the disk writer has nothing left to do; False on timeout."""
        return self._writer.flush(timeout) if self._writer is not None else True

    def close(self) -> None:
        """Write what waits (for at most half a minute), keep the policies' knowledge on disk, close the tiers."""
        if self._writer is not None and not self._writer.close(CLOSE_SECONDS):
            log.error("the disk tier did not take the last chunks in %g s; they are lost", CLOSE_SECONDS)
            return
        if self._disk is not None:
            with self._lock:
                known = [(node.key, node.stats) for node in self._index if TierName.DISK in node.tiers]
            self._disk.update_stats(known)
            self._disk.close()
        if self._host is not None:
            self._host.close()

    # Parts ----------------------------------------------------------------------------------------------------

    def _hold(self, lease: Lease, path: Path) -> None:
        now = self._clock()
        lease.nodes = list(path.nodes)
        lease.partial, lease.partial_tokens = path.partial, path.partial_tokens
        lease.below_device = sum(node.n_tokens for node in path.nodes if node.page is None)
        if path.partial is not None and path.partial.page is None:
            lease.below_device += path.partial_tokens
        for node in [*path.nodes, *([path.partial] if path.partial else [])]:
            self._take(node)
            node.stats.accesses += 1
            node.stats.last_access = now

    def _take(self, node: Node) -> None:
        node.leases += 1
        for tier in node.tiers:
            self._queues[tier].discard(node)  # not even looked at by evictions until it is let go

    def _let_go(self, node: Node) -> None:
        node.leases -= 1
        for tier in node.tiers:
            self._transfer.enlist(node, tier)
        if not node.tiers and not node.leases:  # every copy failed verification
            self._transfer.drop_subtree(node, reason="integrity", lost=True)

    def _drop_partial(self, lease: Lease) -> None:
        if lease.partial is not None:
            self._let_go(lease.partial)
            lease.partial, lease.partial_tokens = None, 0

    def _truncate(self, lease: Lease, length: int) -> None:
        with self._lock:
            self._drop_partial(lease)
            for node in reversed(lease.nodes[length:]):
                self._let_go(node)
            del lease.nodes[length:]
            lease.published = length

    def _load_partial(self, lease: Lease, node: Node) -> None:
        """Copy the shared rows of one more chunk into a page of the lease's own.

        The chunk itself is promoted too if there is room: it is in use, and the next hit finds it on the device.
        """
        near = lease.pages[-1] if lease.pages else None
        page = self._transfer.take_page(near)
        tier = None
        if page is not None:
            source = self._transfer.promote(node, None)
            copied = self._transfer.copy_rows(node, self._arena.page_view(page, lease.partial_tokens))
            tier = source if copied is not None and source is not None else copied
        with self._lock:
            if page is not None and tier is not None:
                lease.private.add(len(lease.pages))
                lease.pages.append(page)
                lease.count(tier, lease.partial_tokens)
            elif page is not None:
                self._arena.free(page)
            self._drop_partial(lease)

    def _load_nodes(self, lease: Lease) -> None:
        parts = self._parts(lease)
        for position, node in enumerate(lease.nodes):
            if not self._worth_loading(parts[position:], lease):
                self._truncate(lease, position)
                return
            near = lease.pages[-1] if lease.pages else None
            tier = self._transfer.promote(node, near, self._pages_to_come(lease))
            if tier is None:
                self._truncate(lease, position)
                return
            assert node.page is not None
            lease.pages.append(node.page)
            lease.count(tier, node.n_tokens)
        lease.published = len(lease.nodes)

    def _pages_to_come(self, lease: Lease) -> int:
        return -(-lease.looked_up // self._layout.chunk_size) - len(lease.pages)

    def _parts(self, lease: Lease) -> list[Part]:
        """The hit as the planner sees it: each chunk with the fastest tier that has it."""
        with self._lock:
            pieces = [(node, node.n_tokens) for node in lease.nodes]
            if lease.partial is not None:
                pieces.append((lease.partial, lease.partial_tokens))
            return [
                Part(
                    min(node.tiers, key=_ORDER.__getitem__, default=TierName.GPU),
                    n,
                    self._layout.payload_bytes(node.n_tokens),
                )
                for node, n in pieces
            ]

    def _worth_loading(self, parts: list[Part], lease: Lease) -> bool:
        return self.planner.parts_to_load(parts, lease.hit_tokens) > 0

    def _account(self, lease: Lease) -> None:
        """Hits and misses in one step, so that they add up to the lookups at any time."""
        if not lease.counted:
            return
        with self._lock:
            counters = self._counters
            if lease.below_device:
                loaded = sum(n for tier, n in lease.hits.items() if tier is not TierName.GPU)
                decision = "load" if loaded >= lease.below_device else "split" if lease.hit_tokens else "recompute"
                counters.planner_decisions[decision] += 1
            counters.lookups += 1
            counters.lookup_tokens += lease.looked_up
            counters.miss_tokens += lease.looked_up - lease.hit_tokens
            counters.hit_tokens.update(lease.hits)

    def _publish_chunk(self, lease: Lease, tokens: bytes, fresh: list[Node]) -> bool:
        index = lease.published
        parent = lease.nodes[-1] if lease.nodes else None
        key = chunk_key(parent.key if parent else lease.root, tokens)
        node = self._index.find(key, tokens)
        if node is None:
            if self._index.get(key) is not None:
                return False  # other tokens under this key: keep our chunks private
            node = self._new_node(lease, parent, key, tokens)
            self._add(node)
            self._drop_superseded(node, lease.root)
            fresh.append(node)
        if node.page is None and node.busy is None:
            self._transfer.own_page(node, lease.pages[index])
            lease.private.discard(index)
            if TierName.DISK not in node.tiers and node not in fresh:
                fresh.append(node)  # its copy on disk was dropped, or never written
        elif node.page is not None and index in lease.private and node.page != lease.pages[index]:
            self._arena.free(lease.pages[index])
            lease.pages[index] = node.page
            lease.private.discard(index)
        self._take(node)
        lease.nodes.append(node)
        return True

    def _publish_tail(self, lease: Lease, tokens: bytes, fresh: list[Node]) -> None:
        index = lease.published
        parent = lease.nodes[-1] if lease.nodes else None
        if index not in lease.private:
            return
        known = self._index.family(lease.root, parent).closest(tokens, self._read_tokens)
        if known is not None and len(tokens) // TOKEN_BYTES - known[1] < MIN_NEW_TAIL_TOKENS:
            return
        key = chunk_key(parent.key if parent else lease.root, tokens)
        if self._index.get(key) is not None:
            return
        node = self._new_node(lease, parent, key, tokens)
        self._add(node)
        self._drop_superseded(node, lease.root)
        self._transfer.own_page(node, lease.pages[index])
        lease.private.discard(index)
        self._take(node)
        lease.nodes.append(node)
        fresh.append(node)

    def _add(self, node: Node) -> None:
        self._index.add(node)
        self._ghosts.discard(node.key)

    def _departed(self, node: Node, tier: TierName, reason: str) -> None:
        self._pins.forget(node)
        if reason != "superseded":  # a longer chunk has all of it
            self._ghosts.add(node.key, Departure(self._clock(), tier, reason))

    def _expire_pins(self) -> None:
        if self._pins.expire():
            self._save_pins()

    def _save_pins(self) -> None:
        if self._writer is not None and self._disk is not None:
            with self._lock:
                pins = self._pins.snapshot()
            self._writer.run(lambda disk: disk.save_pins(pins))

    def _new_node(self, lease: Lease, parent: Node | None, key: bytes, tokens: bytes) -> Node:
        record = ChunkRecord(
            key=key,
            parent=parent.key if parent else lease.root,
            identity=self._identity,
            n_tokens=len(tokens) // TOKEN_BYTES,
            depth=parent.record.depth + 1 if parent else 0,
        )
        now = self._clock()
        stats = ChunkStats(accesses=1, last_access=now, created=now, important_share=IMPORTANT_FRACTION)
        return Node(record, tokens, parent, stats)

    def _drop_superseded(self, node: Node, root: bytes) -> None:
        """A shorter chunk with the same beginning at the same place has nothing that the new one hasn't."""
        tokens = node.tokens or b""
        for sibling in self._index.family(root, node.parent):
            shorter = sibling is not node and sibling.n_tokens < node.n_tokens
            if shorter and not sibling.held and tokens.startswith(self._index.tokens_of(sibling) or b"\xff"):
                self._transfer.drop_subtree(sibling, reason="superseded")

    def _enqueue(self, node: Node) -> None:
        if self._writer is not None and not self._writer.offer(node):
            with self._lock:
                self._counters.dropped_stores["queue_full"] += 1

    def _drop_on_disk(self, key: bytes) -> None:
        if self._writer is not None:
            self._writer.drop(key)

    def _read_tokens(self, node: Node) -> bytes | None:
        return self._disk.tokens(node.key) if self._disk is not None else None

    def _usage(self) -> dict[TierName, TierUsage]:
        on_device = self._transfer.chunks_on_device
        usage = {
            TierName.GPU: TierUsage(
                self._arena.n_pages * self._layout.chunk_bytes,
                (self._arena.n_pages - self._arena.free_pages) * self._layout.chunk_bytes,
                on_device,
            )
        }
        if self._host is not None:
            usage[TierName.CPU] = self._host.usage()
        if self._disk is not None:
            usage[TierName.DISK] = self._disk.usage()
        return usage

    def _rebuild(self, disk: DiskTier) -> None:
        """Rebuild the tree from the disk's metadata; chunks whose parent is gone can't be reached and are dropped."""
        orphans: list[bytes] = []
        for record, stats, _ in sorted(disk.records(), key=lambda row: row[0].depth):
            parent = self._index.get(record.parent)
            if record.depth > 0 and parent is None:
                orphans.append(record.key)
                continue
            node = Node(record, None, parent, stats, tiers={TierName.DISK})
            self._index.add(node)
        for node in sorted(self._index, key=lambda n: (n.stats.last_access, -n.record.depth)):
            self._queues[TierName.DISK].touch(node)
        self._pins.restore(disk.pins())
        if orphans:
            disk.drop_many(orphans)
            log.info("dropped %d chunks on disk whose parent is gone", len(orphans))
