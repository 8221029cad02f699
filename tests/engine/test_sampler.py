import torch

from gateway.engine.sampler import Sampler
from gateway.engine.types import SamplingParams

CPU = torch.device("cpu")
VOCAB = 1000


def sampler(prompt: list[int] | None = None, **settings: object) -> Sampler:
    return Sampler(SamplingParams(max_tokens=8, **settings), prompt or [], VOCAB, CPU)  # type: ignore[arg-type]


def logits(**values: float) -> torch.Tensor:
    row = torch.full((VOCAB,), -10.0)
    for name, value in values.items():
        row[int(name[1:])] = value
    return row


def draws(s: Sampler, row: torch.Tensor, n: int = 200) -> set[int]:
    return {s.sample(row) for _ in range(n)}


def test_temperature_zero_takes_the_best_token() -> None:
    assert draws(sampler(temperature=0), logits(t5=1.0, t6=1.1)) == {6}


def test_top_k_keeps_exactly_k_tokens() -> None:
    assert draws(sampler(top_k=2, seed=1), logits(t1=3.0, t2=3.0, t3=2.9)) == {1, 2}


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    # Probabilities 0.5, 0.3, 0.2 (rest ~0): 0.6 needs the first two.
    row = torch.full((VOCAB,), -1e9)
    row[:3] = torch.tensor([0.5, 0.3, 0.2]).log()
    assert draws(sampler(top_p=0.6, seed=3), row) == {0, 1}


def test_top_p_over_a_flat_distribution_is_not_cut_by_the_first_guess() -> None:
    # 1,000 equal tokens: 0.9 of the mass is 900 of them, more than the quick look at the head holds.
    row = torch.zeros(VOCAB)
    row[torch.arange(VOCAB)] += torch.linspace(0, 1e-3, VOCAB)  # a strict order: the lowest 100 fall out
    chosen = draws(sampler(top_p=0.9, seed=5), row, 4000)
    assert min(chosen) >= 99
    assert len(chosen) > 700


def test_min_p_drops_tokens_far_below_the_best() -> None:
    row = torch.full((VOCAB,), -1e9)
    row[:3] = torch.tensor([0.6, 0.35, 0.05]).log()
    assert draws(sampler(min_p=0.1, seed=2), row) == {0, 1}


def test_equal_seeds_draw_equal_tokens_and_negative_seeds_work() -> None:
    row = torch.zeros(VOCAB)
    first, second, other = sampler(seed=-7), sampler(seed=-7), sampler(seed=8)
    a = [first.sample(row) for _ in range(20)]
    assert a == [second.sample(row) for _ in range(20)]
    assert a != [other.sample(row) for _ in range(20)]


def test_unseeded_samplers_differ() -> None:
    row = torch.zeros(VOCAB)
    runs = {tuple(s.sample(row) for _ in range(8)) for s in (sampler(), sampler(), sampler())}
    assert len(runs) == 3


def test_logit_bias_forces_and_forbids() -> None:
    assert draws(sampler(temperature=0, logit_bias={7: 100.0}), logits(t1=5.0)) == {7}
    assert draws(sampler(temperature=0, logit_bias={1: -100.0}), logits(t1=5.0, t2=4.0)) == {2}


def test_presence_and_frequency_penalties_count_the_answer_only() -> None:
    row = logits(t1=5.0, t2=4.5)
    presence = sampler(prompt=[1, 1], temperature=0, presence_penalty=1.0)
    assert [presence.sample(row) for _ in range(3)] == [1, 2, 1]
    frequency = sampler(temperature=0, frequency_penalty=0.3)
    assert [frequency.sample(row) for _ in range(4)] == [1, 1, 2, 1]


def test_repetition_penalty_counts_the_prompt_too() -> None:
    row = logits(t1=5.0, t2=4.5)
    assert sampler(prompt=[1], temperature=0, repetition_penalty=1.5).sample(row) == 2
    assert sampler(prompt=[], temperature=0, repetition_penalty=1.5).sample(row) == 1


def test_logits_are_not_changed() -> None:
    row = logits(t1=5.0, t2=4.0)
    before = row.clone()
    sampler(temperature=0.7, top_p=0.5, logit_bias={3: 1.0}, presence_penalty=1.0).sample(row)
    assert torch.equal(row, before)
