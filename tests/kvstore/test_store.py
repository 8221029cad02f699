"""PrefixStore over real tiers, with recognisable bytes in every page."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import DeviceArena, DiskTier, HostTier, KVLayout, Lease, PrefixStore
from kvstore.tiers.base import TierName

CHUNK = 16
LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, dtype=torch.float32, chunk_size=CHUNK)
IDENTITY = bytes(range(32))
CHUNK_BYTES = LAYOUT.chunk_bytes
DISK_ROOM = 1 << 20

Make = Callable[..., PrefixStore]

_folders = itertools.count()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Open a store in the test's folder; at most one at a time, as a restart would."""
    opened: list[PrefixStore] = []

    def open_store(
        pages: int = 12,
        host: int = 12,
        disk: int = DISK_ROOM,
        policy: str = "lru",
        identity: bytes = IDENTITY,
        folder: str = "store",
        **more: int,
    ) -> PrefixStore:
        for store in opened:
            store.close()
        opened.clear()
        arena = DeviceArena(LAYOUT, pages, torch.device("cpu"))
        host_tier = HostTier(LAYOUT, host * 4096 * -(-CHUNK_BYTES // 4096)) if host else None
        disk_tier = DiskTier(LAYOUT, tmp_path / folder, disk, identity=identity, min_free_bytes=0) if disk else None
        store = PrefixStore(LAYOUT, identity, arena, host=host_tier, disk=disk_tier, policy=policy, **more)
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        store.close()


def kv_of(prefix: list[int]) -> torch.Tensor:
    """The KV of the last token of a prefix: depends on all tokens before it, as in a model."""
    generator = torch.Generator().manual_seed(hash(tuple(prefix)) & 0x7FFFFFFF)
    return torch.rand(LAYOUT.layers, 2, LAYOUT.kv_heads, LAYOUT.head_dim, generator=generator)


def compute(store: PrefixStore, lease: Lease, tokens: list[int], start: int) -> None:
    assert store.reserve(lease, len(tokens))
    for position in range(start, len(tokens)):
        page, slot = divmod(position, CHUNK)
        store._arena.page_view(lease.pages[page], CHUNK)[:, :, :, slot] = kv_of(tokens[: position + 1])


def check(store: PrefixStore, lease: Lease, tokens: list[int]) -> None:
    for position in range(lease.hit_tokens):
        page, slot = divmod(position, CHUNK)
        got = store._arena.page_view(lease.pages[page], CHUNK)[:, :, :, slot]
        assert torch.equal(got, kv_of(tokens[: position + 1])), f"wrong KV at position {position}"


def run(store: PrefixStore, tokens: list[int], namespace: str = "", flush: bool = True) -> Lease:
    """One request from lookup to release; the returned lease still tells its hits."""
    lease = store.begin(tokens, namespace)
    store.load(lease)
    check(store, lease, tokens)
    compute(store, lease, tokens, lease.hit_tokens)
    store.publish(lease, tokens, len(tokens), final=True)
    store.release(lease)
    if flush:
        assert store.flush(20)
    invariants(store)
    return lease


def invariants(store: PrefixStore) -> None:
    """DESIGN's promises, checked against the store's own books."""
    stats = store.stats()
    assert sum(stats.hit_tokens.values()) + stats.miss_tokens == stats.lookup_tokens
    owned = [node.page for node in store._index if node.page is not None]
    assert len(owned) == len(set(owned)), "two chunks own one page"
    if not stats.leases:
        assert stats.pages_free == stats.pages_total - len(owned), "a page leaked"
        assert all(node.leases == 0 for node in store._index), "a lease leaked"
    for node in store._index:
        assert node.tiers or node.busy, "a chunk without bytes is in the tree"
        assert (node.page is not None) == (TierName.GPU in node.tiers)
        assert node.parent is None or store._index.get(node.parent.key) is node.parent, "a parent left before its child"
        for name, tier in ((TierName.CPU, store._host), (TierName.DISK, store._disk)):
            if tier is not None:
                assert tier.has(node.key) == (name in node.tiers)
    for usage in stats.usage.values():
        assert usage.used_bytes <= usage.capacity_bytes


def ids(seed: int, n: int) -> list[int]:
    return [(seed * 7919 + i * 31 + i * i) % 50_000 for i in range(n)]


def test_the_second_request_hits_all_but_the_last_token(make: Make) -> None:
    store = make()
    tokens = ids(1, 60)
    assert run(store, tokens).hit_tokens == 0
    assert run(store, tokens).hits == {TierName.GPU: 59}


def test_a_long_prompt_in_a_full_arena_gets_adjacent_pages(make: Make) -> None:
    """The chunks that give way leave tail first; one page at a time, the new prompt would lie in reverse."""
    store = make(pages=13)
    run(store, ids(1, 12 * CHUNK))
    tokens = ids(2, 12 * CHUNK)
    lease = store.begin(tokens)
    store.load(lease)
    for computed in range(CHUNK, len(tokens) + 1, CHUNK):
        assert store.reserve(lease, computed)
    breaks = sum(right != left + 1 for left, right in itertools.pairwise(lease.pages))
    assert breaks <= 2
    store.release(lease)
    invariants(store)


@pytest.mark.parametrize("shared", [1, 14, 15, 16, 17, 18, 31, 32, 33, 34, 47, 48, 49])
@pytest.mark.parametrize("tier", list(TierName))
def test_token_exact_hits_at_every_edge_from_every_tier(make: Make, shared: int, tier: TierName) -> None:
    store = make()
    first = ids(1, 60)
    run(store, first)
    if tier is TierName.CPU:
        for other in range(2, 6):
            run(store, ids(other, 44))
    if tier is TierName.DISK:
        store = make()
    lease = run(store, [*first[:shared], *ids(9, 20)])
    assert lease.hit_tokens == shared
    if tier is not TierName.CPU or shared > CHUNK:
        assert lease.hits.get(tier, 0) > 0


def test_a_conversation_grows_and_replaces_its_partial_tails(make: Make) -> None:
    store = make()
    tokens: list[int] = []
    for turn in range(6):
        tokens = [*tokens, *ids(turn + 20, 11)]
        assert run(store, tokens).hit_tokens == (len(tokens) - 11 if turn else 0)
    assert len([n for n in store._index if n.n_tokens < CHUNK]) == 1, "older tails are superseded"


def test_a_restart_serves_the_same_hits_from_disk(make: Make) -> None:
    tokens = ids(3, 100)
    before = make()
    run(before, tokens)
    after = make()
    assert after.match(tokens).tiers == {TierName.DISK: 100}
    assert run(after, tokens).hits == {TierName.DISK: 99}
    assert run(after, tokens).hits == {TierName.GPU: 99}


def test_policy_knowledge_survives_a_restart(make: Make) -> None:
    store = make(policy="importance_score")
    tokens = ids(3, 32)
    for _ in range(4):
        run(store, [*tokens, 5])
    lease = store.begin([*tokens, 5])
    store.load(lease)
    mass = torch.zeros(33)
    mass[:8] = 1.0
    store.record_importance(lease, mass)
    store.release(lease)
    known = {node.key: (node.stats.accesses, node.stats.important_share) for node in store._index}
    again = make(policy="importance_score")
    assert {node.key: (node.stats.accesses, node.stats.important_share) for node in again._index} == known
    shares = sorted(share for _, share in known.values())
    assert shares[0] < shares[-1], "the chunk with the attended tokens has the larger share"


def test_pressure_moves_chunks_down_and_hits_bring_them_back(make: Make) -> None:
    store = make(pages=8, host=8)
    for seed in range(12):
        run(store, ids(seed, 60))
    stats = store.stats()
    assert stats.demotions[TierName.CPU] > 0
    assert stats.evictions[TierName.GPU, "capacity"] > 0
    assert stats.evictions[TierName.CPU, "capacity"] > 0
    lease = run(store, ids(0, 60))
    assert lease.hits == {TierName.DISK: 59}
    assert store.stats().promotions[TierName.DISK] > 0


def test_caps_hold_on_disk_and_parents_outlive_children(make: Make) -> None:
    store = make(pages=8, host=0, disk=400_000)
    for seed in range(30):
        run(store, ids(seed % 17, 60 + seed))
    assert store.stats().evictions[TierName.DISK, "capacity"] > 0


@pytest.mark.parametrize("tiers", [{"host": 0}, {"disk": 0}, {"host": 0, "disk": 0}])
def test_fewer_tiers_work(make: Make, tiers: dict[str, int]) -> None:
    store = make(pages=8, **tiers)
    for seed in (1, 2, 1, 3, 4, 5, 1):
        run(store, ids(seed, 70))
    assert run(store, ids(1, 70)).hit_tokens == 69


def test_namespaces_and_identities_never_meet(make: Make) -> None:
    tokens = ids(4, 50)
    store = make()
    run(store, tokens, "a")
    assert run(store, tokens, "b").hit_tokens == 0
    assert run(store, tokens, "a").hit_tokens == 49
    other = make(identity=bytes(32))
    assert run(other, tokens, "a").hit_tokens == 0
    assert run(make(), tokens, "a").hits == {TierName.DISK: 49}, "the first identity's chunks are still there"


def test_use_cache_false_neither_reads_nor_writes(make: Make) -> None:
    store = make()
    tokens = ids(5, 50)
    run(store, tokens)
    lease = store.begin([*tokens[:40], *ids(6, 30)], use_cache=False)
    store.load(lease)
    assert lease.hit_tokens == 0
    assert store.reserve(lease, 70)
    store.publish(lease, [*tokens[:40], *ids(6, 30)], 70, final=True)
    store.release(lease)
    assert store.match([*tokens[:40], *ids(6, 30)]).n_tokens == 40


def test_a_damaged_value_is_a_miss_and_is_repaired(make: Make) -> None:
    tokens = ids(7, 64)
    store = make()
    run(store, tokens)
    store = make(host=0)
    damage(store)
    lease = run(store, tokens)
    assert lease.hit_tokens < 63
    assert sum(store.stats().integrity_failures.values()) == 1
    store = make(host=0)
    assert run(store, tokens).hits == {TierName.DISK: 63}


def damage(store: PrefixStore) -> None:
    """Flip one bit in the stored value of the second chunk, through LMDB itself."""
    disk = store._disk
    assert disk is not None
    node = next(n for n in store._index if n.record.depth == 1)
    with disk._env.write() as txn:
        cursor = txn.cursor(db=disk._env.db(b"values"))
        assert cursor.set_range(node.key)
        value = bytearray(cursor.value())
        value[-5] ^= 4
        cursor.put(bytes(cursor.key()), bytes(value))


def test_a_full_write_queue_drops_and_counts(make: Make) -> None:
    store = make(write_queue_chunks=1)
    lock = store._disk._write_lock  # type: ignore[union-attr]
    with lock:  # the writer hangs, as on a stuck disk
        run(store, ids(1, 80), flush=False)
    assert store.flush(20)
    assert store.stats().dropped_stores["queue_full"] > 0
    invariants(store)


def test_a_full_arena_refuses_and_loses_nothing(make: Make) -> None:
    store = make(pages=6)
    first = store.begin(ids(1, 80))
    store.load(first)
    assert store.reserve(first, 80)
    second = store.begin(ids(2, 40))
    store.load(second)
    assert not store.reserve(second, 40)
    assert store.stats().pages_free == 1
    store.release(first)
    assert store.reserve(second, 40)
    store.release(second)
    assert store.stats().pages_free == 6


def test_a_hit_with_no_room_ends_early(make: Make) -> None:
    store = make(pages=8)
    run(store, ids(1, 60))
    store = make(pages=8)
    holder = store.begin(ids(2, 90))
    store.load(holder)
    assert store.reserve(holder, 90)
    lease = store.begin(ids(1, 60))
    store.load(lease)
    check(store, lease, ids(1, 60))
    assert lease.hit_tokens == 2 * CHUNK
    store.release(lease)
    store.release(holder)
    invariants(store)


def test_equal_chunks_of_running_requests_are_stored_once(make: Make) -> None:
    store = make()
    tokens = ids(1, 40)
    leases = [store.begin(tokens) for _ in range(2)]
    for lease in leases:
        store.load(lease)
        compute(store, lease, tokens, 0)
        store.publish(lease, tokens, len(tokens))
    assert leases[0].pages[:2] == leases[1].pages[:2]
    for lease in leases:
        store.release(lease)
        store.release(lease)
    invariants(store)


def test_two_requests_for_one_chunk_load_it_once(make: Make) -> None:
    tokens = ids(1, 100)
    run(make(), tokens)
    store = make(host=0)
    leases = [store.begin(tokens) for _ in range(4)]
    threads = [threading.Thread(target=store.load, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(store.stats().promotions.values()) == 7
    for lease in leases:
        assert lease.hit_tokens == 99
        check(store, lease, tokens)
        store.release(lease)
    invariants(store)


def test_pinned_chunks_stay_and_forgotten_ones_go(make: Make) -> None:
    store = make(pages=8, host=0, disk=0)
    tokens = ids(1, 48)
    run(store, [*tokens, 1])
    assert store.pin(tokens) == 48
    for seed in range(2, 9):
        run(store, ids(seed, 60))
    assert run(store, [*tokens, 1]).hit_tokens == 48
    assert store.unpin(tokens) == 48
    assert store.forget(tokens[:32]) > 0
    assert store.match(tokens).n_tokens == 16


def test_a_pin_keeps_what_another_prefix_unpins(make: Make) -> None:
    store = make()
    trunk = ids(1, 32)
    run(store, [*trunk, *ids(2, 17)])
    store.pin([*trunk, *ids(2, 17)])
    store.pin(trunk)
    store.unpin(trunk)
    assert all(node.pins for node in store._index if node.n_tokens == CHUNK)


def test_forget_spares_prefixes_that_only_begin_alike(make: Make) -> None:
    store = make()
    run(store, [7, *ids(1, 40)])
    assert store.forget([7, *ids(2, 40)]) == 0
    assert store.match([7, *ids(1, 40)]).n_tokens == 41
    assert store.forget([7, *ids(1, 5)]) > 0
    assert store.match([7, *ids(1, 40)]).n_tokens == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),  # which conversation
            st.integers(1, 90),  # how much of it
            st.sampled_from(["whole", "cut", "abandon", "restart"]),
            st.sampled_from(["", "tenant"]),
        ),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from(["lru", "lfu", "importance_score"]),
)
def test_any_history_gives_exact_bytes_and_keeps_the_books(
    make: Make, history: list[tuple[int, int, str, str]], policy: str
) -> None:
    folder = f"history-{next(_folders)}"
    store = make(pages=7, host=4, disk=300_000, policy=policy, folder=folder)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for conversation, length, ending, namespace in history:
        if ending == "restart":
            store = make(pages=7, host=4, disk=300_000, policy=policy, folder=folder)
            continue
        tokens = [*ids(conversation % 3, 40), *ids(conversation, 90)][: length + 1]
        lease = store.begin(tokens, namespace)
        store.load(lease)
        check(store, lease, tokens)
        known = max((common(tokens, list(t)) for n, t in seen if n == namespace), default=0)
        assert lease.hit_tokens <= min(known, len(tokens) - 1), "KV of tokens that nobody computed"
        if ending != "abandon":
            done = len(tokens) if ending == "whole" else max(lease.hit_tokens, len(tokens) // 2)
            compute(store, lease, tokens[:done], lease.hit_tokens)
            store.publish(lease, tokens, done, final=True)
            seen.add((namespace, tuple(tokens[:done])))
        store.release(lease)
        invariants_when_quiet(store)


def invariants_when_quiet(store: PrefixStore) -> None:
    assert store.flush(20)
    invariants(store)


def common(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_the_disk_writer_gives_way_to_the_engine_and_nobody_else_does(make: Make) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    store = make()
    assert store.flush(timeout=10)
    (writer,) = [thread for thread in threading.enumerate() if thread.name == "kvgate-disk-writer"]
    assert writer.native_id is not None
    assert os.getpriority(os.PRIO_PROCESS, writer.native_id) == min(19, mine + 10)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine
