"""A cache without payloads: the tiers, tree and queues of the store, moved by a trace."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.eviction import EvictionQueue
from kvstore.policy import EvictionPolicy
from kvstore.tiers.base import ChunkStats, TierName


class Block:
    """A chunk of a trace; in the tree as long as some tier holds it."""

    __slots__ = ("children", "depth", "key", "n_tokens", "parent", "stats", "tiers")

    def __init__(self, key: int, parent: Block | None, n_tokens: int, now: float) -> None:
        self.key = key
        self.parent = parent
        self.n_tokens = n_tokens
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.stats = ChunkStats(last_access=now, created=now)
        self.tiers: set[TierName] = set()
        self.children = 0  # in the tree


class _TierState:
    def __init__(self, name: TierName, capacity: int, policy: EvictionPolicy) -> None:
        self.name = name
        self.capacity = capacity
        self.used = 0
        self.queue: EvictionQueue[Block] = EvictionQueue(policy)


class TieredCache:
    """What ``PrefixStore`` does with chunks, as its documentation says, with sizes in blocks.

    A request holds its blocks while it runs. Hits are promoted to the device and keep their lower copies; new blocks
    come in on the device and on disk; what leaves the device goes to the host.
    """

    def __init__(self, sizes: dict[TierName, int], policy: EvictionPolicy) -> None:
        self._tiers: dict[TierName, _TierState] = {}
        for name, capacity in sizes.items():
            if capacity > 0 or name is TierName.GPU:
                self._tiers[name] = _TierState(name, capacity, policy if not self._tiers else policy.sibling())
        self._device = self._tiers[TierName.GPU]
        self._host = self._tiers.get(TierName.CPU)
        self._disk = self._tiers.get(TierName.DISK)
        self._tree: dict[int, Block] = {}

    def __len__(self) -> int:
        return len(self._tree)

    def blocks(self, tier: TierName) -> list[Block]:
        return [block for block in self._tree.values() if tier in block.tiers]

    def request(self, keys: Sequence[int], n_tokens: int, size: int, now: float) -> dict[TierName, int]:
        """Serve a prompt of ``n_tokens`` in blocks of ``size`` tokens; its hit blocks by the tier they came from."""
        chain = self._walk(keys)
        for block in chain:
            block.stats.accesses += 1
            block.stats.last_access = now
            for name in block.tiers:
                self._tiers[name].queue.discard(block)  # held
        held = list(chain)
        hits = self._promote(chain)
        if len(chain) == len(held):
            self._store(keys, chain, n_tokens, size, now)
        self._device.queue.observe(chain, now)
        for block in reversed(held[len(chain) :] or ()):
            self._let_go(block)
        for block in reversed(chain):
            self._let_go(block)
        return hits

    def _let_go(self, block: Block) -> None:
        for name in block.tiers:
            self._tiers[name].queue.touch(block)

    def _walk(self, keys: Sequence[int]) -> list[Block]:
        chain: list[Block] = []
        parent: Block | None = None
        for key in keys:
            block = self._tree.get(key)
            if block is None or block.parent is not parent:
                break
            chain.append(block)
            parent = block
        return chain

    def _promote(self, chain: list[Block]) -> dict[TierName, int]:
        """Bring the held blocks to the device; where there is no room the chain is cut."""
        hits: dict[TierName, int] = {}
        for place, block in enumerate(chain):
            source = TierName.GPU
            if TierName.GPU not in block.tiers:
                source = next(name for name in TierName if name in block.tiers)
                if not self._take_page():
                    del chain[place:]
                    break
                block.tiers.add(TierName.GPU)
            hits[source] = hits.get(source, 0) + 1
        return hits

    def _store(self, keys: Sequence[int], chain: list[Block], n_tokens: int, size: int, now: float) -> None:
        for place in range(len(chain), len(keys)):
            key, parent = keys[place], chain[-1] if chain else None
            if key in self._tree or not self._take_page():
                return  # an id with two parents, or a prompt that is larger than the device
            block = Block(key, parent, min(size, n_tokens - place * size), now)
            self._tree[key] = block
            if parent is not None:
                parent.children += 1
            block.tiers.add(TierName.GPU)
            chain.append(block)
            disk = self._disk
            if disk is not None and (parent is None or TierName.DISK in parent.tiers) and self._make_room(disk):
                block.tiers.add(TierName.DISK)
                disk.used += 1

    def _take_page(self) -> bool:
        device = self._device
        if device.used < device.capacity:
            device.used += 1
            return True
        victim = device.queue.pop(self._may_leave_device)
        if victim is None:
            return False
        self._demote(victim)
        victim.tiers.discard(TierName.GPU)
        self._prune(victim)
        return True  # the page changes hands

    def _demote(self, block: Block) -> None:
        host = self._host
        if host is not None and TierName.CPU not in block.tiers and self._make_room(host):
            host.used += 1
            block.tiers.add(TierName.CPU)
            host.queue.touch(block)

    def _make_room(self, tier: _TierState) -> bool:
        if tier.used < tier.capacity:
            return True
        victim = tier.queue.pop(_may_leave)
        if victim is None:
            return False
        victim.tiers.discard(tier.name)
        tier.used -= 1
        self._prune(victim)
        return True

    def _may_leave_device(self, block: Block) -> bool:
        return self._host is not None or _may_leave(block)

    def _prune(self, block: Block) -> None:
        if not block.tiers:
            del self._tree[block.key]
            if block.parent is not None:
                block.parent.children -= 1


def _may_leave(block: Block) -> bool:
    return len(block.tiers) > 1 or not block.children
