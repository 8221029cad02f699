"""Requests that share a prefix nobody has computed yet: one computes it, the others wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from gateway.engine.types import GenerationRequest, SamplingParams

from .test_equality import CHUNK, Bench, wait_idle, words


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("following"), ["gpu"])
    yield made
    made.close()


def computed_tokens(bench: Bench) -> int:
    stats = bench.engine.store_stats()
    return stats.miss_tokens


def test_a_prefix_asked_for_by_many_at_once_is_computed_once(bench: Bench) -> None:
    trunk = words(1, 8 * CHUNK)
    prompts = [[*trunk, *words(10 + i, 5)] for i in range(5)]

    async def together() -> Any:
        return await asyncio.gather(*(bench.ask(prompt) for prompt in prompts))

    before = computed_tokens(bench)
    answers = bench.do(together())
    assert computed_tokens(bench) - before == len(trunk) + 5 * 5
    assert sorted(started.cache.cached_tokens for _, started in answers) == [0, *[len(trunk)] * 4]
    wait_idle(bench)
    for prompt, (tokens, _) in zip(prompts, answers, strict=True):
        assert tokens == bench.cold(prompt)


def test_other_namespaces_and_other_prompts_do_not_wait(bench: Bench) -> None:
    trunk = words(2, 8 * CHUNK)
    before = computed_tokens(bench)

    async def together() -> Any:
        return await asyncio.gather(bench.ask([*trunk, 1], "a"), bench.ask([*trunk, 1], "b"), bench.ask(words(3, 40)))

    answers = bench.do(together())
    assert [started.cache.cached_tokens for _, started in answers] == [0, 0, 0]
    assert computed_tokens(bench) - before == 2 * (len(trunk) + 1) + 40


def test_a_follower_takes_over_when_the_first_one_leaves(bench: Bench) -> None:
    trunk = words(4, 12 * CHUNK)

    async def leave_and_follow() -> Any:
        first = bench.engine.generate(
            GenerationRequest("leaver", [*trunk, 7], SamplingParams(max_tokens=5, temperature=0), "warm")
        )
        async with aclosing(first):
            await anext(first)  # looked up; its prefill goes on
            follower = asyncio.ensure_future(bench.ask([*trunk, 8]))
            await asyncio.sleep(0.02)
        return await asyncio.wait_for(follower, 60)

    tokens, _ = bench.do(leave_and_follow())
    wait_idle(bench)
    assert tokens == bench.cold([*trunk, 8])


def test_a_follower_of_a_failed_step_computes_for_itself(bench: Bench) -> None:
    trunk = words(5, 6 * CHUNK)
    real, calls = bench.engine._runner.forward, iter(range(1000))

    def broken(batch: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("a step that fails")
        return real(batch)

    async def together() -> Any:
        return await asyncio.gather(
            *(bench.ask([*trunk, i]) for i in range(2)), return_exceptions=True
        )  # fmt: skip

    bench.engine._runner.forward = broken  # type: ignore[method-assign]
    try:
        first, second = bench.do(together())
    finally:
        bench.engine._runner.forward = real  # type: ignore[method-assign]
    assert isinstance(first, Exception)
    assert second[0] == bench.cold([*trunk, 1])
