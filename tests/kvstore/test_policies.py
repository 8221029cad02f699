"""What every policy must keep: prefix-closure, capacity, and the same answer twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.policy import POLICIES, make_policy
from kvstore.policy.reuse import BUCKETS, CLASSES, ReuseModel, age_bucket
from kvstore.replay import TierSizes, replay
from kvstore.replay.cache import Block, TieredCache
from kvstore.tiers.base import TierName
from tests.kvstore.traces import BLOCK, conversations

CAPACITIES = st.tuples(st.integers(1, 12), st.integers(0, 12), st.integers(0, 30))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), sizes=CAPACITIES)
def test_no_parent_leaves_before_its_child(policy: str, seed: int, sizes: tuple[int, int, int]) -> None:
    capacity = dict(zip(TierName, sizes, strict=True))
    cache = TieredCache(capacity, make_policy(policy))
    for at, n_tokens, blocks in conversations(seed, 40):
        cache.request(blocks, n_tokens, BLOCK, at)
        for tier in TierName:
            held = cache.blocks(tier)
            assert len(held) <= capacity[tier]
            if tier is not TierName.CPU:  # a parent may be on the device while its child is on the host already
                assert all(block.parent is None or tier in block.parent.tiers for block in held)
        reachable = [block for tier in TierName for block in cache.blocks(tier)]
        assert all(block.parent is None or block.parent.tiers for block in reachable)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_gives_the_same_answer_twice(policy: str) -> None:
    trace = conversations(3, 400)
    first, second = (replay(trace, policy, TierSizes(20, 10, 40)) for _ in range(2))
    assert first.hit_tokens == second.hit_tokens
    assert sum(first.hit_tokens.values()) > 0


def test_s3fifo_lets_a_scan_pass_by() -> None:
    cache = TieredCache({TierName.GPU: 20}, make_policy("s3fifo"))
    for at in range(3):
        cache.request([1, 2, 3], 3 * BLOCK, BLOCK, float(at))
    for at in range(100):
        cache.request([100 + at], BLOCK, BLOCK, 3.0 + at)
    assert cache.request([1, 2, 3], 3 * BLOCK, BLOCK, 200.0) == {TierName.GPU: 3}


def test_tlru_gives_up_the_tail_of_the_newest_before_the_oldest_head() -> None:
    size = 512  # two chunks are the slack
    cache = TieredCache({TierName.GPU: 8}, make_policy("tlru"))
    cache.request([1, 2, 3, 4], 4 * size, size, 0.0)
    cache.request([11, 12, 13, 14], 4 * size, size, 1.0)
    cache.request([21, 22, 23, 24], 4 * size, size, 2.0)
    assert {1, 2, 11, 12, 21, 22, 23, 24} == {block.key for block in cache.blocks(TierName.GPU)}


def test_reuse_is_learned() -> None:
    """Two kinds of prompts: one comes back after a minute, the other never. Its value must be far above."""
    model = ReuseModel()
    for step in range(3000):
        now = float(step)
        fresh = Block(10_000 + step, None, BLOCK, now)
        model.observe([fresh], now)
        chunk = Block(step % 60, None, BLOCK, now)
        chunk.stats.accesses = 1 + step // 60
        model.observe([chunk], now)
    bucket = age_bucket(30.0)
    assert model.value[model.class_of(chunk)][bucket] > 5 * model.value[model.class_of(fresh)][bucket]


def test_value_falls_with_age_when_nothing_is_known() -> None:
    table = ReuseModel().value
    assert len(table) == CLASSES and all(len(row) == BUCKETS for row in table)
    assert all(earlier >= later for row in table for earlier, later in zip(row, row[1:], strict=False))


def test_ages_have_buckets_in_order() -> None:
    ages = [0.0, 0.99, 1.0, 2.0, 60.0, 3600.0, 1e9]
    buckets = [age_bucket(age) for age in ages]
    assert buckets == sorted(buckets) and buckets[-1] == BUCKETS - 1
