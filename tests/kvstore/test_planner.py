"""The planner: never plans what it expects to take longer than computing, and learns from what happened."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore import PrefixStore
from kvstore.planner import RETRY_SECONDS, ComputeModel, Part, Planner
from kvstore.tiers.base import ChunkRecord, TierName

from .test_store import CHUNK, LAYOUT, Make, ids, make, run

__all__ = ["make"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def chunks(n: int, tier: TierName = TierName.DISK) -> list[Part]:
    return [Part(tier, 256, 1_000_000)] * n


def taught(linear: float, square: float, clock: Clock | None = None) -> Planner:
    planner = Planner(clock or Clock())
    for start in range(0, 4096, 256):
        planner.observe_compute(start, 256, linear * 256 + square * 256 * (start + 128))
    return planner


@pytest.mark.parametrize(("linear", "square"), [(1e-3, 0.0), (5e-4, 1e-7), (0.0, 1e-7)])
def test_the_compute_model_finds_both_factors(linear: float, square: float) -> None:
    model = ComputeModel()
    for start in range(0, 4096, 256):
        model.observe(start, 256, linear * 256 + square * 256 * (start + 128))
    expected = linear * 1000 + square * 1000 * 2500
    assert model.seconds(2000, 3000) == pytest.approx(expected, rel=0.02)


def test_without_knowledge_everything_is_loaded() -> None:
    assert Planner().parts_to_load(chunks(5), 0) == 5
    assert taught(1e-3, 0).parts_to_load(chunks(5), 0) == 5, "the tier's speed shows only by loading"


def test_a_fast_tier_is_loaded_and_a_slow_one_is_not() -> None:
    planner = taught(1e-3, 0)  # 0.256 s a chunk
    planner.observe_load(TierName.DISK, 1_000_000, 0.2)
    assert planner.parts_to_load(chunks(5), 0) == 5
    planner = taught(1e-3, 0)
    planner.observe_load(TierName.DISK, 1_000_000, 0.3)
    assert planner.parts_to_load(chunks(5), 0) == 0


def test_pages_on_the_device_are_always_used() -> None:
    planner = taught(1e-3, 0)
    planner.observe_load(TierName.DISK, 1_000_000, 9.0)
    mixed = [*chunks(3, TierName.GPU), *chunks(3)]
    assert planner.parts_to_load(mixed, 0) == 3


def test_a_slow_head_is_worth_it_when_the_device_has_what_follows() -> None:
    planner = taught(1e-3, 0)
    planner.observe_load(TierName.DISK, 1_000_000, 0.3)
    assert planner.parts_to_load([*chunks(1), *chunks(4, TierName.GPU)], 0) == 5


def test_late_chunks_are_dearer_to_compute_so_loading_them_pays_sooner() -> None:
    planner = taught(1e-4, 1e-6)
    planner.observe_load(TierName.DISK, 1_000_000, 0.3)  # a chunk at 0 takes 0.06 s to compute, at 4,096 1.1 s
    assert planner.parts_to_load(chunks(1), 0) == 0
    assert planner.parts_to_load(chunks(1), 4096) == 1
    assert planner.parts_to_load(chunks(16), 0) == 16


def test_a_slow_tier_is_tried_again_by_one_request_after_a_while() -> None:
    clock = Clock()
    planner = taught(1e-3, 0, clock)
    planner.observe_load(TierName.DISK, 1_000_000, 5.0)
    assert planner.parts_to_load(chunks(4), 0) == 0
    clock.now += RETRY_SECONDS
    assert planner.parts_to_load(chunks(4), 0) == 1
    assert planner.parts_to_load(chunks(4), 0) == 0
    for _ in range(12):
        planner.observe_load(TierName.DISK, 1_000_000, 0.001)
    assert planner.parts_to_load(chunks(4), 0) == 4


@given(
    st.lists(st.sampled_from(list(TierName)), max_size=12),
    st.floats(1e-6, 1e-2),
    st.floats(0, 1e-6),
    st.floats(1e-4, 10),
    st.floats(1e-4, 10),
)
def test_a_plan_is_never_expected_to_be_slower_than_computing(
    tiers: list[TierName], linear: float, square: float, host: float, disk: float
) -> None:
    planner = taught(linear, square)
    planner.observe_load(TierName.CPU, 1_000_000, host)
    planner.observe_load(TierName.DISK, 1_000_000, disk)
    parts = [Part(tier, 256, 1_000_000) for tier in tiers]
    seconds = {TierName.GPU: 0.0, TierName.CPU: host, TierName.DISK: disk}
    n = planner.parts_to_load(parts, 0)
    rest = planner.compute_seconds(256 * n, 256 * len(parts)) or 0.0
    everything = planner.compute_seconds(0, 256 * len(parts)) or 0.0
    assert sum(seconds[tier] for tier in tiers[:n]) + rest <= everything * 1.0001 + 1e-9


class SlowReads:
    """A real disk tier behind a clock that runs on by a second with each load."""

    def __init__(self, store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads = 0
        disk = store._disk
        assert disk is not None
        real = disk.get_into

        def slow(record: ChunkRecord, tokens: bytes, target: torch.Tensor, n_tokens: int) -> None:
            self.loads += 1
            real(record, tokens, target, n_tokens)

        monkeypatch.setattr(disk, "get_into", slow)
        observe = store.planner.observe_load
        monkeypatch.setattr(store.planner, "observe_load", lambda tier, size, _: observe(tier, size, 1.0))


def test_a_hit_on_a_slow_disk_is_computed_after_the_first_chunk_showed_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(host=0)
    tokens = ids(1, 6 * CHUNK + 1)
    run(store, tokens)
    store = make(host=0)
    for start in range(0, 6 * CHUNK, CHUNK):
        store.planner._compute.observe(start, CHUNK, 0.01)
    slow = SlowReads(store, monkeypatch)
    assert run(store, tokens, flush=False).hits == {TierName.DISK: CHUNK}, "one chunk told how slow the tier is"
    assert slow.loads == 1
    assert store.stats().planner_decisions == {"split": 1}
    other = ids(2, 4 * CHUNK + 1)
    run(store, other)
    store.forget(other)
    assert LAYOUT.chunk_size == CHUNK
    assert run(store, tokens).hit_tokens == 6 * CHUNK, "what was computed is on the device now"
