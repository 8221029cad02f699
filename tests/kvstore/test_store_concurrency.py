"""Four threads over tiny tiers: exact bytes always, books in order whenever it is quiet."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from kvstore import PrefixStore
from kvstore.tiers.base import TierName

from .test_store import CHUNK, Make, check, compute, ids, invariants, make, run  # noqa: F401  (make is a fixture)

THREADS, ROUNDS, REQUESTS = 4, 3, 150


def request(store: PrefixStore, choose: random.Random) -> None:
    conversation = choose.randrange(5)
    tokens = [*ids(conversation % 3, 40), *ids(conversation, 60)][: choose.randrange(2, 70)]
    action = choose.random()
    if action < 0.05:
        store.forget(tokens)
        return
    if action < 0.1:
        store.pin(tokens)
        store.match(tokens)
        store.unpin(tokens)
        return
    lease = store.begin(tokens, choose.choice(["", "tenant"]))
    try:
        store.load(lease)
        check(store, lease, tokens)
        if choose.random() < 0.2 or not store.reserve(lease, len(tokens)):
            return
        compute(store, lease, tokens, lease.hit_tokens)
        for done in range(CHUNK, len(tokens), CHUNK):
            store.publish(lease, tokens, done)
        store.publish(lease, tokens, len(tokens), final=True)
        check(store, lease, tokens)
        store.record_importance(lease, torch.rand(len(tokens)))
    finally:
        store.release(lease)


@pytest.mark.parametrize(("policy", "host"), [("lru", 6), ("lfu", 0), ("importance_score", 3)])
def test_threads_never_see_wrong_bytes_and_leave_the_books_in_order(make: Make, policy: str, host: int) -> None:  # noqa: F811
    store = make(pages=14, host=host, disk=500_000, policy=policy)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(REQUESTS):
                request(store, choose)
        except BaseException as error:
            failures.append(error)

    for turn in range(ROUNDS):
        threads = [threading.Thread(target=work, args=(turn * THREADS + i,), daemon=True) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "deadlock"
        assert not failures, failures[0]
        assert store.flush(20)
        invariants(store)
        assert store.stats().leases == 0
    assert not store.stats().integrity_failures


def test_a_lease_that_comes_and_goes_while_its_chunk_is_demoted(make: Make) -> None:  # noqa: F811
    """The chunk is back in the queue by then; the eviction that finishes must take it out again."""
    store = make(pages=7, disk=0)
    tokens = ids(1, 17)
    run(store, tokens)
    host = store._host
    assert host is not None
    put = host.put

    def slow_put(record, *rest):  # type: ignore[no-untyped-def]
        if record.n_tokens == CHUNK:
            store.release(store.begin(tokens))
        return put(record, *rest)

    host.put = slow_put  # type: ignore[method-assign]
    for seed in range(2, 8):
        run(store, ids(seed, 60))
    assert store.stats().evictions[TierName.GPU, "capacity"] > 0


def test_a_disk_that_hangs_neither_blocks_requests_nor_holds_pages(make: Make) -> None:  # noqa: F811
    store = make(pages=7, host=0)
    disk = store._disk
    assert disk is not None
    with disk._write_lock:
        run(store, ids(1, 60), flush=False)
        time.sleep(0.05)  # the writer has packed its first chunk and waits for the disk
        lease = store.begin(ids(2, 90))
        store.load(lease)
        assert store.reserve(lease, 90), "every page but the packed ones is to be had"
        store.release(lease)
    assert store.flush(20)
    invariants(store)
