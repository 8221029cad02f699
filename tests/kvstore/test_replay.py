"""Replay: against a naive LRU, below the bound, and errors that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.policy import POLICIES
from kvstore.replay import TierSizes, Trace, TraceError, belady, read_trace, replay
from kvstore.tiers.base import TierName
from tests.kvstore.traces import BLOCK, conversations, write


def naive_lru(trace: Trace, capacity: int) -> int:
    """Hit tokens of leaf-first LRU, written for clearness: a list of blocks, searched each time."""
    last: dict[int, tuple[float, int]] = {}  # block: time, turn (a chain is touched from its end)
    parents: dict[int, int | None] = {}
    hit_tokens = turn = 0
    for at, n_tokens, blocks in trace:
        hits = next((i for i, block in enumerate(blocks) if block not in last), len(blocks))
        hit_tokens += min(hits * trace.block_tokens, n_tokens)
        kept = list(blocks[:hits])
        for i in range(hits, len(blocks)):
            if len(last) >= capacity:
                in_use = {parents[block] for block in last} | set(kept)
                free = [block for block in last if block not in in_use]
                if not free:
                    break
                del last[min(free, key=lambda block: last[block])]
            parents[blocks[i]] = blocks[i - 1] if i else None
            last[blocks[i]] = (at, turn)
            kept.append(blocks[i])
        for block in reversed(kept):
            turn += 1
            last[block] = (at, turn)
    return hit_tokens


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), capacity=st.integers(1, 60))
def test_lru_is_what_a_naive_lru_is(seed: int, capacity: int) -> None:
    trace = conversations(seed, 80)
    assert sum(replay(trace, "lru", TierSizes(capacity)).hit_tokens.values()) == naive_lru(trace, capacity)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), sizes=st.tuples(st.integers(1, 40), st.integers(0, 20), st.integers(0, 40)))
def test_no_policy_beats_the_bound(policy: str, seed: int, sizes: tuple[int, int, int]) -> None:
    trace = conversations(seed, 80, partial=False)
    hits = sum(replay(trace, policy, TierSizes(*sizes)).hit_tokens.values())
    assert hits <= belady(trace, sum(sizes))


@pytest.mark.parametrize("policy", [*POLICIES, "belady"])
def test_with_room_for_all_everything_that_came_before_hits(policy: str) -> None:
    trace = conversations(1, 300)
    seen: set[int] = set()
    expected = 0
    for _, n_tokens, blocks in trace:
        expected += min(sum(block in seen for block in blocks) * BLOCK, n_tokens)
        seen.update(blocks)
    room = trace.distinct_blocks()
    got = belady(trace, room) if policy == "belady" else sum(replay(trace, policy, TierSizes(room)).hit_tokens.values())
    assert got == expected > 0


def test_lower_tiers_serve_what_the_device_let_go() -> None:
    trace = Trace("tiers", BLOCK)
    for at, first in enumerate([1, 11, 1, 11]):
        trace.append(float(at), 3 * BLOCK, [first, first + 1, first + 2])
    outcome = replay(trace, "lru", TierSizes(3, 6, 0))
    assert outcome.hit_tokens == {TierName.CPU: 6 * BLOCK}
    assert replay(trace, "lru", TierSizes(3, 0, 6)).hit_tokens == {TierName.DISK: 6 * BLOCK}
    assert replay(trace, "lru", TierSizes(3)).hit_tokens == {}
    assert outcome.saved_share == pytest.approx(0.5) and outcome.microseconds_a_chunk > 0


def test_a_prompt_larger_than_the_device_is_kept_as_far_as_it_goes() -> None:
    trace = Trace("large", BLOCK)
    for at in range(2):
        trace.append(float(at), 5 * BLOCK, [1, 2, 3, 4, 5])
    assert replay(trace, "lru", TierSizes(3)).hit_tokens == {TierName.GPU: 3 * BLOCK}


def test_a_device_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="device"):
        replay(conversations(1, 3), "lru", TierSizes(0, 5))


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = conversations(5, 60)
    again = read_trace(write(trace, tmp_path / "trace.jsonl"))
    assert [(n, list(b)) for _, n, b in again] == [(n, list(b)) for _, n, b in trace]
    assert again.block_tokens == BLOCK and again.block_uses == trace.block_uses


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", ":2: not a request"),
        ("[1]", "JSON object"),
        ('{"timestamp": 0, "hash_ids": [1]}', "'input_length' is missing"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": ["a"]}', "whole numbers"),
        ('{"timestamp": 0, "input_length": 0, "hash_ids": [1]}', "at least one token"),
        ('{"timestamp": 0, "input_length": 900, "hash_ids": [1, 2, 3]}', "block size"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [99999999999999999999999]}', ":2: not a request"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 20, "output_length": 1, "hash_ids": [1, 2]}\n' + line + "\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_no_trace_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for path, words in ((tmp_path / "empty.jsonl", "no request"), (tmp_path / "none", "No such file")):
        with pytest.raises(TraceError, match=words):
            read_trace(path)
