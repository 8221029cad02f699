"""Policies rank chunks, and the queue hands them out by rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.eviction import EvictionQueue
from kvstore.importance import fold, important_shares
from kvstore.index import Node
from kvstore.policy import POLICIES, make_policy
from kvstore.tiers.base import ChunkRecord, ChunkStats


def make_node(name: int, stats: ChunkStats | None = None) -> Node:
    key = name.to_bytes(16, "little")
    return Node(ChunkRecord(key, bytes(16), bytes(32), 4, 0), None, None, stats or ChunkStats())


def order_of(policy: str, stats: list[ChunkStats]) -> list[int]:
    """In which order chunks with these stats leave."""
    queue: EvictionQueue[Node] = EvictionQueue(make_policy(policy))
    nodes = [make_node(i, each) for i, each in enumerate(stats)]
    for node in nodes:
        queue.touch(node)
    left: list[int] = []
    while (node := queue.pop(lambda _: True)) is not None:
        left.append(nodes.index(node))
    return left


def test_lru_lets_the_longest_unused_go_first() -> None:
    assert order_of("lru", [ChunkStats(9, 30.0), ChunkStats(1, 10.0), ChunkStats(5, 20.0)]) == [1, 2, 0]


def test_lfu_lets_the_least_used_go_first() -> None:
    assert order_of("lfu", [ChunkStats(9, 1.0), ChunkStats(1, 3.0), ChunkStats(5, 2.0)]) == [1, 2, 0]


def test_fifo_lets_the_oldest_go_first_however_used() -> None:
    assert order_of("fifo", [ChunkStats(9, 30.0, 2.0), ChunkStats(1, 10.0, 1.0), ChunkStats(5, 20.0, 3.0)]) == [1, 0, 2]


def test_impress_is_frequency_times_share() -> None:
    stats = [ChunkStats(accesses=9, important_share=0.1), ChunkStats(2, important_share=1.0), ChunkStats(3)]
    assert order_of("impress", stats) == [0, 1, 2]


def test_gdsf_ages_old_favourites() -> None:
    policy = make_policy("gdsf")
    favourite = policy.rank(make_node(1, ChunkStats(accesses=10))).priority
    queue = EvictionQueue(policy)
    for number in range(20):
        queue.touch(make_node(number))
        queue.pop(lambda _: True)
    assert policy.rank(make_node(2)).priority > favourite


def test_importance_score_without_knowledge_is_lru() -> None:
    assert order_of("importance_score", [ChunkStats(1, 30.0), ChunkStats(1, 10.0), ChunkStats(1, 20.0)]) == [1, 2, 0]


def test_importance_score_keeps_what_matters_more_among_equals() -> None:
    shares = [0.25, 0.9, 0.05]
    stats = [ChunkStats(1, 10.0, important_share=share) for share in shares]
    assert order_of("importance_score", stats) == [2, 0, 1]


def test_an_unknown_policy_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="best") as caught:
        make_policy("best")
    assert all(name in str(caught.value) for name in POLICIES)


def test_the_queue_skips_what_may_not_leave_and_keeps_it() -> None:
    queue: EvictionQueue[Node] = EvictionQueue(make_policy("lru"))
    first, second = make_node(1, ChunkStats(last_access=1.0)), make_node(2, ChunkStats(last_access=2.0))
    queue.touch(first)
    queue.touch(second)
    assert queue.pop(lambda node: node is second) is second
    assert queue.pop(lambda node: False) is None
    assert queue.pop(lambda node: True) is first


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["touch", "discard", "pop"]), st.integers(0, 7), st.floats(0, 100)), max_size=400
    )
)
def test_the_queue_agrees_with_sorting(history: list[tuple[str, int, float]]) -> None:
    queue: EvictionQueue[Node] = EvictionQueue(make_policy("lru"))
    nodes = [make_node(i) for i in range(8)]
    model: dict[int, tuple[float, int]] = {}
    for step, (action, number, at) in enumerate(history):
        if action == "touch":
            nodes[number].stats.last_access = at
            queue.touch(nodes[number])
            model[number] = (at, step)
        elif action == "discard":
            queue.discard(nodes[number])
            model.pop(number, None)
        else:
            expected = min(model, key=lambda n: model[n], default=None)
            got = queue.pop(lambda _: True)
            assert got is (None if expected is None else nodes[expected])
            model.pop(expected, None)  # type: ignore[arg-type]
        assert len(queue) == len(model)


def test_a_chunk_is_as_important_as_its_share_of_the_top_quarter() -> None:
    mass = torch.zeros(32, dtype=torch.bfloat16)
    mass[:6] = 2.0
    mass[20:22] = 1.0
    assert important_shares(mass, 16) == [6 / 16, 2 / 16]


def test_a_short_last_chunk_is_judged_by_its_own_tokens() -> None:
    mass = torch.tensor([0.0] * 16 + [1.0, 0.0, 1.0, 1.0])
    shares = important_shares(mass, 16)
    assert len(shares) == 2
    assert shares[1] >= 3 / 4


def test_measurements_are_averaged() -> None:
    average = 1.0
    for _ in range(50):
        average = fold(average, 0.25)
    assert average == pytest.approx(0.25, abs=1e-3)
    assert 0.25 < fold(1.0, 0.25) < 1.0
