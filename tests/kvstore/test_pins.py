"""Pins: kept through pressure and restarts, ended by time or by hand; what left is remembered."""

from __future__ import annotations

import math

import pytest

from kvstore.steering import PinLimitExceeded
from kvstore.tiers.base import TierName

from .test_store import CHUNK, Make, ids, make, run

__all__ = ["make"]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_pin_survives_pressure_on_every_tier_and_a_restart(make: Make) -> None:
    sizes = {"pages": 8, "host": 6, "disk": 200_000}
    store = make(**sizes)
    tokens = ids(1, 40)
    run(store, tokens)
    assert store.pin(tokens) == 40, "the tail too"
    for seed in range(2, 30):
        run(store, ids(seed, 60))
    assert store.match(tokens).n_tokens == 40
    assert store.flush(20)
    store = make(**sizes)
    for seed in range(30, 60):
        run(store, ids(seed, 60))
    assert store.match(tokens).n_tokens == 40, "pinned after the restart too"
    assert store.unpin(tokens) == 40
    for seed in range(60, 90):
        run(store, ids(seed, 60))
    assert store.match(tokens).n_tokens == 0


def test_a_pin_ends_with_its_time(make: Make) -> None:
    clock = Clock()
    store = make(pages=8, host=0, disk=0, clock=clock)
    tokens = ids(1, 32)
    run(store, tokens)
    store.pin(tokens, ttl=60)
    assert store.overview()[0].pinned_until == clock.now + 60
    clock.now += 59
    for seed in range(2, 9):
        run(store, ids(seed, 60))
    assert store.match(tokens).n_tokens == 32
    clock.now += 2
    for seed in range(9, 16):
        run(store, ids(seed, 60))
    assert store.match(tokens).n_tokens == 0


def test_a_pin_that_ran_out_while_the_store_was_closed_does_not_come_back(make: Make) -> None:
    clock = Clock()
    store = make(clock=clock)
    run(store, ids(1, 32))
    store.pin(ids(1, 32), ttl=60)
    clock.now += 61
    store = make(clock=clock)
    assert store.match(ids(1, 32)).n_tokens == 32
    assert store.overview()[0].pinned_until is None


def test_a_pinned_prefix_leaves_the_device_but_not_the_cache(make: Make) -> None:
    """Else enough pins would leave running requests no page."""
    store = make(pages=6, host=20, disk=0)
    run(store, ids(1, 64))
    store.pin(ids(1, 64))
    run(store, ids(2, 90))
    match = store.match(ids(1, 64))
    assert match.n_tokens == 64 and match.tiers.get(TierName.CPU, 0) >= 48


def test_pins_are_bounded(make: Make) -> None:
    store = make(pages=8, host=0, disk=0)
    run(store, ids(1, 64))
    run(store, ids(2, 32))
    store.pin(ids(1, 64))
    with pytest.raises(PinLimitExceeded, match="unpin others"):
        store.pin(ids(2, 32))
    assert store.unpin(ids(1, 64)) == 64
    assert store.pin(ids(2, 32)) == 32


def test_unpinning_finds_a_tail_that_has_been_outgrown(make: Make) -> None:
    store = make()
    run(store, ids(1, 20))
    assert store.pin(ids(1, 20)) == 20
    run(store, ids(1, 30))
    assert store.unpin(ids(1, 20)) > 0
    assert not any(node.pins for node in store._index)
    assert store.unpin(ids(1, 20)) == 0


def test_what_left_is_remembered_with_tier_and_reason(make: Make) -> None:
    clock = Clock()
    store = make(pages=6, host=0, disk=0, clock=clock)
    tokens = ids(1, 2 * CHUNK)
    run(store, tokens)
    clock.now = 2000.0
    for seed in range(2, 6):
        run(store, ids(seed, 80))
    gone = store.explain(tokens).departed
    assert gone is not None and (gone.at, gone.tier, gone.reason) == (2000.0, TierName.GPU, "capacity")
    run(store, tokens)
    assert store.explain(tokens).departed is None


def test_explain_shows_how_the_closest_prompt_goes_on(make: Make) -> None:
    store = make()
    trunk = ids(1, 20)
    run(store, [*trunk, 5, 6, 7, *ids(2, 20)])
    found = store.explain([*trunk, 8, 9])
    assert found.match.n_tokens == 20
    assert found.continuation is not None and found.continuation[:3] == [5, 6, 7]
    assert store.explain([*trunk, 5, 6]).continuation is None, "all of it is cached"
    assert store.explain([*trunk, 8, 9], "another tenant").continuation is None


def test_overview_shows_only_its_own_namespace(make: Make) -> None:
    store = make()
    run(store, ids(1, 40), "a")
    run(store, ids(2, 50), "b")
    (only,) = store.overview("a")
    assert only.tokens == 40 and only.first_tokens == ids(1, CHUNK)
    store.pin(ids(1, 40), "a")
    assert store.overview("a")[0].pinned_until == math.inf
    assert store.overview("c") == []
