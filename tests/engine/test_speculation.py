"""Speculation changes nothing but the number of steps: the same tokens with and without, whatever the settings."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
import torch

from gateway.engine.drafter import MAX_DRAFT, Drafter
from gateway.engine.grammar_spec import Regex
from gateway.engine.speculation import StepCost, until_end
from gateway.engine.types import Delta, FinishReason, GenerationRequest, SamplingParams

from .test_equality import CHUNK, Bench, wait_idle

_names = itertools.count()

LIST = (
    "1. The blue pump of the north tower, serial 4471, was replaced on Monday.\n"
    "2. The red valve of the south tower, serial 9032, leaks since Tuesday.\n"
    "3. The green router in the cellar, serial 1187, has never failed.\n"
    "4. The old battery of the lift, serial 5520, is charged every night.\n"
)
COPY = f"Copy this list word for word.\n{LIST}"
EXTRACT = f"{LIST}\nWrite down each serial number with its sentence, as in the list."


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("on"), ["gpu"])
    assert made.engine._speculator is not None
    # On a busy machine a step with a draft may be measured as not worth it: here all that match are tried.
    made.engine._speculator.cost.share = lambda sequences: 0.02  # type: ignore[method-assign]
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("off"), ["gpu"], speculation=False)
    yield made
    made.close()


def prompt(bench: Bench, text: str, answer: str = "") -> list[int]:
    tokenizer = bench.engine.tokenizer
    start = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(start + answer, add_special_tokens=False)["input_ids"])


async def deltas(bench: Bench, ids: list[int], grammar: Any = None, **sampling: Any) -> list[Delta]:
    settings = {"max_tokens": 80, "temperature": 0.0, **sampling}
    request = GenerationRequest(f"s{next(_names)}", ids, SamplingParams(**settings), "t", grammar=grammar)
    found = []
    async with aclosing(bench.engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                found.append(event)
    return found


def tokens(found: list[Delta]) -> list[int]:
    return [token for delta in found for token in delta.token_ids]


def accepted(bench: Bench) -> int:
    return bench.engine.stats().accepted_tokens


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "seed": 3},
    "nucleus": {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 11},
    "min_p": {"temperature": 1.0, "min_p": 0.2, "seed": 5},
    "penalties": {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.05},
    "bias, sampled": {"temperature": 0.5, "seed": 1, "logit_bias": {198: -3.0}},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 130},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("text", [COPY, EXTRACT], ids=["copy", "extract"])
def test_the_same_tokens_as_without(spec: Bench, plain: Bench, text: str, name: str) -> None:
    ids = prompt(spec, text, "1. The blue pump")
    before = accepted(spec)
    with_drafts = spec.do(deltas(spec, ids, **SETTINGS[name]))
    without = plain.do(deltas(plain, ids, **SETTINGS[name]))
    assert tokens(with_drafts) == tokens(without)
    assert "".join(d.text for d in with_drafts) == "".join(d.text for d in without)
    assert with_drafts[-1].finish_reason is without[-1].finish_reason
    assert accepted(spec) > before


def test_fewer_steps_than_tokens(spec: Bench) -> None:
    ids = prompt(spec, COPY, "1. The blue pump")
    spec.do(deltas(spec, ids, max_tokens=2))
    steps = 0
    real = spec.engine._runner.forward

    def count(batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return real(batch)

    spec.engine._runner.forward = count  # type: ignore[method-assign]
    try:
        found = tokens(spec.do(deltas(spec, ids)))
    finally:
        spec.engine._runner.forward = real  # type: ignore[method-assign]
    assert steps < len(found) / 2


def test_in_a_batch_of_greedy_and_sampled_rows(spec: Bench, plain: Bench) -> None:
    asked = [
        (prompt(spec, COPY, "1. The blue pump"), {"temperature": 0.8, "seed": 1}),
        (prompt(spec, EXTRACT, "1. The blue pump"), {}),
        (prompt(spec, COPY, "2. The red"), {"frequency_penalty": 0.5}),
        (prompt(spec, "Tell me about the sea."), {"temperature": 1.0, "seed": 4}),
    ]

    async def together(bench: Bench) -> list[list[int]]:
        answers = await asyncio.gather(*(deltas(bench, ids, **more) for ids, more in asked))
        return [tokens(answer) for answer in answers]

    before = accepted(spec)
    assert spec.do(together(spec)) == plain.do(together(plain))
    assert accepted(spec) > before


def test_logprobs_are_those_of_each_position(spec: Bench, plain: Bench) -> None:
    ids = prompt(spec, COPY, "1. The blue pump")
    with_drafts = [p for d in spec.do(deltas(spec, ids, logprobs=3)) for p in d.logprobs]
    without = [p for d in plain.do(deltas(plain, ids, logprobs=3)) for p in d.logprobs]
    assert [p.token_id for p in with_drafts] == [p.token_id for p in without]
    assert [p.logprob for p in with_drafts] == pytest.approx([p.logprob for p in without], abs=2e-3)
    assert [[t for t, _ in p.top] for p in with_drafts] == [[t for t, _ in p.top] for p in without]


def test_a_stop_string_inside_a_draft_ends_the_answer_there(spec: Bench, plain: Bench) -> None:
    ids = prompt(spec, COPY, "1. The blue pump")
    with_drafts = spec.do(deltas(spec, ids, stop=("serial 9032",)))
    without = plain.do(deltas(plain, ids, stop=("serial 9032",)))
    assert "".join(d.text for d in with_drafts) == "".join(d.text for d in without)
    assert with_drafts[-1].stop_string == "serial 9032"
    assert tokens(with_drafts) == tokens(without)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 20])
def test_drafts_end_at_max_tokens(spec: Bench, plain: Bench, most: int) -> None:
    ids = prompt(spec, COPY, "1. The blue pump")
    found = spec.do(deltas(spec, ids, max_tokens=most))
    assert tokens(found) == tokens(plain.do(deltas(plain, ids, max_tokens=most)))
    assert len(tokens(found)) == most
    assert found[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 2}], ids=["greedy", "sampled"])
def test_answers_that_follow_a_grammar(spec: Bench, plain: Bench, settings: dict[str, Any]) -> None:
    grammar = Regex(r"( of the [a-z]+ tower, serial [0-9]{4}, [a-z ]{5,40}\.\n[0-9]\. [A-Za-z ]+)+")
    ids = prompt(spec, COPY, "1. The blue pump")
    found = spec.do(deltas(spec, ids, spec.engine.compile_grammar(grammar), **settings))
    assert tokens(found) == tokens(plain.do(deltas(plain, ids, plain.engine.compile_grammar(grammar), **settings)))


def test_kv_of_refused_drafts_is_never_published(spec: Bench) -> None:
    """The prompt ends where its last words went on otherwise before: the first drafts are refused, over a chunk's edge."""
    for lead in range(1, 9):
        ids = prompt(spec, COPY, "1. The blue pump of the north tower, serial 4471, was replaced on Sunday. " * lead)
        answer = tokens(spec.do(deltas(spec, ids, temperature=1.2, seed=lead, max_tokens=2 * CHUNK)))
        wait_idle(spec)
        longer = [*ids, *answer, *prompt(spec, "And now?")]
        warm, started = spec.do(spec.ask(longer, "t"))
        assert started.cache.cached_tokens >= len(ids) + len(answer) - 2
        assert warm == spec.cold(longer)


def test_off_when_deterministic(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = Bench(tmp_path_factory.mktemp("deterministic"), ["gpu"], deterministic=True)
    try:
        made.do(deltas(made, prompt(made, COPY, "1. The blue pump")))
        assert made.engine.stats().drafted_tokens == 0
    finally:
        made.close()


# The drafter alone ------------------------------------------------------------------------------------------------


def test_the_place_with_the_longest_equal_past_is_taken() -> None:
    tokens = [1, 2, 3, 4, 90, 91, 92, 7, 2, 3, 4, 80, 81, 82, 5, 1, 2, 3, 4]
    assert Drafter(64, 0.9).lookup(tokens, 3) == [90, 91, 92]


def test_of_equal_places_the_latest_is_taken() -> None:
    tokens = [0, 1, 2, 3, 50, 51, 0, 1, 2, 3, 60, 61, 0, 1, 2, 3]
    assert Drafter(64, 0.9).lookup(tokens, 2) == [60, 61]


def test_nothing_found_is_no_draft() -> None:
    assert Drafter(64, 0.9).lookup(list(range(40)), 4) == []
    assert Drafter(64, 0.9).lookup([1, 1], 4) == []


def test_a_repeating_text_drafts_its_own_end() -> None:
    assert Drafter(64, 0.9).lookup([5, 6, 7, 5, 6, 7], 8) == [5, 6, 7]


def test_refused_drafts_stop_and_accepted_ones_grow() -> None:
    tokens = [1, 2, 3, *range(10, 40), 1, 2, 3]
    drafter = Drafter(64, 0.5)
    tried = 0
    for _ in range(200):
        drafted = drafter.draft(tokens, 100, 0.1)
        tried += len(drafted)
        if drafted:
            drafter.learn(len(drafted), 0)
    assert tried < 20
    for _ in range(10):
        drafter.learn(1, 1)
    assert len(drafter.draft(tokens, 100, 0.1)) == MAX_DRAFT
    assert drafter.draft(tokens, 2, 0.1) == [10, 11]


def test_the_price_of_a_draft_is_learned_by_batch_size() -> None:
    cost = StepCost()
    for _ in range(100):
        cost.observe(1, 0, 0.020)
        cost.observe(1, 4, 0.024)
        cost.observe(8, 0, 0.040)
        cost.observe(8, 8, 0.072)
    assert cost.share(1) == pytest.approx(0.05, rel=0.05)
    assert cost.share(8) == pytest.approx(0.1, rel=0.05)


def test_a_draft_ends_before_its_first_end_token() -> None:
    assert until_end([4, 5, 2, 6], frozenset({2})) == [4, 5]
    assert until_end([4, 5], frozenset({2})) == [4, 5]
