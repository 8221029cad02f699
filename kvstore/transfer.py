"""Moving chunks between tiers: promote on a hit, demote under pressure, write behind, drop what is damaged."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvstore.eviction import EvictionQueue
from kvstore.index import Node, PrefixIndex
from kvstore.layout import KVLayout
from kvstore.planner import Planner
from kvstore.stats import StoreCounters
from kvstore.tiers.base import IntegrityError, PutOutcome, Tier, TierName
from kvstore.tiers.device import DeviceArena
from kvstore.tiers.disk import DiskTier

log = logging.getLogger(__name__)

#: Threads that may pack a chunk at the same time: engine, loaders, writer.
_STAGING_BUFFERS = 3

#: Most pages made free at once for one sequence. Demoting a chunk takes milliseconds, in which nobody decodes.
_PAGES_AT_ONCE = 8

#: The disk is evicted down to this share of its cap, so that LMDB always has free pages to write into.
_DISK_FILL = 0.9


class Transfer:
    """Copies between tiers under the store's lock discipline: a chunk on the move is ``busy``, its bytes move unlocked.

    Prefix-closed: a chunk leaves a tier only when no child of it is on that tier, and its last copy only when it has
    no child at all. ``drop_on_disk`` hands deletions to the disk writer: a disk that hangs must not hold the lock.
    ``on_departure`` is told, under the lock, of every chunk whose last copy went: from which tier, and why.
    A pinned chunk may leave a tier as long as another one has it.
    """

    def __init__(
        self,
        layout: KVLayout,
        arena: DeviceArena,
        host: Tier | None,
        disk: DiskTier | None,
        index: PrefixIndex,
        queues: dict[TierName, EvictionQueue[Node]],
        counters: StoreCounters,
        lock: threading.RLock,
        drop_on_disk: Callable[[bytes], None],
        on_departure: Callable[[Node, TierName, str], None],
        planner: Planner,
    ) -> None:
        self._layout = layout
        self._arena = arena
        self._host = host
        self._disk = disk
        self._index = index
        self._queues = queues
        self._counters = counters
        self._lock = lock
        self._drop_on_disk = drop_on_disk
        self._on_departure = on_departure
        self._planner = planner
        self.chunks_on_device = 0
        self._writing_below: Node | None = None  # parent of the chunk that the writer stores
        self._staging: queue.LifoQueue[torch.Tensor] = queue.LifoQueue()
        for _ in range(_STAGING_BUFFERS):
            self._staging.put(torch.zeros(layout.chunk_bytes, dtype=torch.uint8))

    # Device ---------------------------------------------------------------------------------------------------

    def take_page(self, near: int | None, want: int = 1) -> int | None:
        """A page of the arena, after ``near`` if possible; evicts the lowest cached chunks if too few are free.

        ``want``: how many the caller will take one after the other. As many are made free at once, so that they can
        lie side by side: chunks leave tail first, and pages taken as they come free would lie in reverse.
        """
        tried: set[bytes] = set()
        want = max(1, min(want, _PAGES_AT_ONCE))
        while True:
            with self._lock:
                if self._arena.follows(near) or self._arena.free_pages >= want:
                    return self._arena.allocate(near, want)
                victim = self._queues[TierName.GPU].pop(
                    lambda node: node.key not in tried and self._may_leave_device(node)
                )
                if victim is None:
                    return self._arena.allocate(near)
                victim.busy = threading.Event()
            tried.add(victim.key)
            page = self._evict_from_device(victim)
            if page is not None:
                with self._lock:
                    self._arena.free(page)

    def _may_leave_device(self, node: Node) -> bool:
        if node.leases or node.busy or any(TierName.GPU in child.tiers for child in node.children):
            return False
        return self._host is not None or len(node.tiers) > 1 or not (node.children or node.pins)

    def _evict_from_device(self, victim: Node) -> int | None:
        """Demote a chunk to host memory, or drop its device copy; None when somebody began to use it meanwhile."""
        demoted = TierName.CPU in victim.tiers or self._demote_to_host(victim)
        with self._lock:
            busy, victim.busy = victim.busy, None
            assert busy is not None
            busy.set()
            needed = bool(victim.children or victim.pins)
            if victim.leases or (needed and not demoted and TierName.DISK not in victim.tiers):
                self.enlist(victim, TierName.GPU)
                return None
            page = self._give_up_page(victim)
            self._counters.evictions[TierName.GPU, "capacity"] += 1
            if not victim.tiers:
                self._depart(victim, TierName.GPU, "capacity")
        return page

    def _demote_to_host(self, node: Node) -> bool:
        if self._host is None:
            return False
        with self._staged() as buffer:
            payload = self._pack(node, buffer)
            outcome = self._put_on_host(node, payload) if payload is not None else PutOutcome.FULL
        if outcome is PutOutcome.STORED:
            with self._lock:
                node.tiers.add(TierName.CPU)
                self.enlist(node, TierName.CPU)
                self._counters.demotions[TierName.CPU] += 1
            return True
        return False

    def _put_on_host(self, node: Node, payload: torch.Tensor) -> PutOutcome:
        assert self._host is not None
        while True:
            outcome = self._host.put(node.record, node.tokens or b"", payload, node.stats)
            if outcome is not PutOutcome.FULL or not self._evict_from(TierName.CPU):
                return outcome

    def promote(self, node: Node, near: int | None, want: int = 1) -> TierName | None:
        """Get a leased chunk into a page; the tier it came from, None when it can't be had (or there is no room).

        ``near`` and ``want`` as in ``take_page``.
        """
        while True:
            with self._lock:
                if node.page is not None:
                    return TierName.GPU
                waiting = node.busy
                if waiting is None:
                    node.busy = threading.Event()
            if waiting is None:
                return self._promote_busy(node, near, want)
            waiting.wait()

    def _promote_busy(self, node: Node, near: int | None, want: int) -> TierName | None:
        started = time.perf_counter()
        page = self.take_page(near, want)
        tier = None
        try:
            if page is not None:
                tier = self.copy_rows(node, self._arena.page_view(page, node.n_tokens))
        finally:
            with self._lock:
                if page is not None and tier is not None:
                    self.own_page(node, page)
                    self._counters.promotions[tier] += 1
                elif page is not None:
                    self._arena.free(page)
                busy, node.busy = node.busy, None
                assert busy is not None
                busy.set()
        if tier is not None:
            self._planner.observe_load(tier, self._layout.payload_bytes(node.n_tokens), time.perf_counter() - started)
        return tier

    def copy_rows(self, node: Node, target: torch.Tensor) -> TierName | None:
        """Copy a chunk's leading tokens into ``target`` from the fastest tier where it verifies."""
        n_tokens = target.shape[3]
        with self._lock:
            page, tokens = node.page, self._index.tokens_of(node)
        if page is not None:
            target.copy_(self._arena.page_view(page, n_tokens))
            return TierName.GPU
        for name, tier in ((TierName.CPU, self._host), (TierName.DISK, self._disk)):
            if tier is None or name not in node.tiers or tokens is None:
                continue
            try:
                tier.get_into(node.record, tokens, target, n_tokens)
                return name
            except IntegrityError as error:
                self._quarantine(node, tier, error)
        return None

    def _quarantine(self, node: Node, tier: Tier, error: IntegrityError) -> None:
        """Never use or keep a copy that did not verify; the next store writes it anew."""
        with self._lock:
            if tier.name not in node.tiers:
                return  # it left the tier while we looked: no fault
            log.warning("a chunk on the %s tier failed verification and is dropped: %s", tier.name, error)
            self._counters.integrity_failures[tier.name, error.cause] += 1
            node.tiers.discard(tier.name)
            self._queues[tier.name].discard(node)
            self._drop_copy(node, tier.name)

    def own_page(self, node: Node, page: int) -> None:
        """Make a page the chunk's device copy. The caller has the lock."""
        node.page = page
        node.tiers.add(TierName.GPU)
        self.chunks_on_device += 1
        self.enlist(node, TierName.GPU)

    def _give_up_page(self, node: Node) -> int:
        assert node.page is not None
        page, node.page = node.page, None
        node.tiers.discard(TierName.GPU)
        self.chunks_on_device -= 1
        self._queues[TierName.GPU].discard(node)
        return page

    def enlist(self, node: Node, name: TierName) -> None:
        """Rank the chunk among those that may leave; one in use comes in when its last lease ends."""
        if not node.leases:
            self._queues[name].touch(node)

    # Lower tiers ----------------------------------------------------------------------------------------------

    def _evict_from(self, name: TierName) -> bool:
        """Drop the lowest chunk's copy on host or disk; False when nothing may leave."""
        with self._lock:
            victim = self._queues[name].pop(lambda node: self._may_leave(node, name))
            if victim is None:
                return False
            victim.tiers.discard(name)
            # "lost": the last copy, which the disk never got
            reason = "capacity" if victim.tiers or name is TierName.DISK else "lost"
            self._counters.evictions[name, reason] += 1
            if not victim.tiers:
                self._depart(victim, name, reason)
            if name is TierName.CPU:
                self._drop_copy(victim, name)
        if name is TierName.DISK and self._disk is not None:
            self._disk.drop(victim.key)  # on the writer thread, which also is the only one that could store it anew
        return True

    def _may_leave(self, node: Node, name: TierName) -> bool:
        if node.busy or (node.leases and node.page is None):
            return False
        if any(name in child.tiers for child in node.children):
            return False
        # Pins: disk is the only tier that a restart leaves. The parent of what is being written: its child would come
        # back from a restart without it.
        if name is TierName.DISK and (node.pins or node is self._writing_below):
            return False
        return len(node.tiers) > 1 or not (node.children or node.pins)

    def drop_subtree(self, top: Node, *, reason: str, lost: bool = False) -> int:
        """Forget a chunk and all below it on every tier, as far as nothing holds them; returns the tokens dropped.

        With ``lost`` (the chunk's bytes are gone, so nothing below it can be reached) pins don't protect. The caller
        has the lock.
        """
        order = [top]
        for node in order:  # grows while it runs: parents first
            order.extend(node.children)
        dropped = 0
        for node in reversed(order):
            if lost:
                node.pins.clear()
            if node.held or len(node.children):
                continue
            slowest = max(node.tiers, key=list(TierName).index, default=TierName.DISK)
            for name in list(node.tiers):
                self._queues[name].discard(node)
                self._counters.evictions[name, reason] += 1
                self._drop_copy(node, name)
            node.tiers.clear()
            self._depart(node, slowest, reason)
            dropped += node.n_tokens
        return dropped

    def _depart(self, node: Node, last: TierName, reason: str) -> None:
        self._index.remove(node)
        self._on_departure(node, last, reason)

    def largest_capacity(self) -> int:
        """Bytes of the tier that can hold most."""
        tiers = [tier.usage().capacity_bytes for tier in (self._host, self._disk) if tier is not None]
        return max([self._arena.n_pages * self._layout.chunk_bytes, *tiers])

    def _drop_copy(self, node: Node, name: TierName) -> None:
        if name is TierName.GPU:
            self._arena.free(self._give_up_page(node))
        elif name is TierName.CPU and self._host is not None:
            self._host.drop(node.key)
        elif name is TierName.DISK:
            self._drop_on_disk(node.key)

    # Write-behind ---------------------------------------------------------------------------------------------

    def write_to_disk(self, node: Node) -> None:
        """Store a chunk on disk, its missing ancestors first; called by the writer thread."""
        missing: list[Node] = []
        with self._lock:
            ancestor: Node | None = node
            while ancestor is not None and TierName.DISK not in ancestor.tiers:
                missing.append(ancestor)
                ancestor = ancestor.parent
        for chunk in reversed(missing):
            if not self._write_one(chunk):
                return

    def _write_one(self, node: Node) -> bool:
        assert self._disk is not None
        with self._lock:
            if not node.tiers or self._index.get(node.key) is not node:
                return self._dropped("evicted")
            node.leases += 1  # stays where it is while it is packed, no longer: the disk may be slow
        with self._staged() as buffer:
            try:
                payload = self._pack(node, buffer)
            finally:
                with self._lock:
                    node.leases -= 1
                    for name in node.tiers:
                        self.enlist(node, name)
            self._writing_below = node.parent
            try:
                outcome = self._put_on_disk(node, payload) if payload is not None else None
            finally:
                self._writing_below = None
        if outcome is not PutOutcome.STORED:
            return self._dropped(outcome.value if outcome is not None else "source_lost")
        with self._lock:
            if self._index.get(node.key) is not node:
                self._disk.drop(node.key)  # evicted everywhere meanwhile: nobody would find it
                return self._dropped("evicted")
            node.tiers.add(TierName.DISK)
            self.enlist(node, TierName.DISK)
        return True

    def _dropped(self, reason: str) -> bool:
        with self._lock:
            self._counters.dropped_stores[reason] += 1
        return False

    def _put_on_disk(self, node: Node, payload: torch.Tensor) -> PutOutcome:
        assert self._disk is not None
        usage = self._disk.usage()
        room = int(usage.capacity_bytes * _DISK_FILL) - self._disk.stored_bytes(node.n_tokens)
        while self._disk.usage().used_bytes > max(0, room) and self._evict_from(TierName.DISK):
            pass
        while True:
            outcome = self._disk.put(node.record, node.tokens or b"", payload, node.stats)
            if outcome is not PutOutcome.FULL or not self._evict_from(TierName.DISK):
                return outcome

    @contextmanager
    def _staged(self) -> Iterator[torch.Tensor]:
        buffer = self._staging.get()
        try:
            yield buffer
        finally:
            self._staging.put(buffer)

    def _pack(self, node: Node, buffer: torch.Tensor) -> torch.Tensor | None:
        """The chunk's packed payload in a reused buffer, from the fastest tier; None when no copy verifies."""
        source = self.copy_rows(node, self._layout.packed_view(buffer, node.n_tokens))
        return buffer[: self._layout.payload_bytes(node.n_tokens)] if source is not None else None
