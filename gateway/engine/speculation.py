"""Prompt-lookup speculation: drafts copied from what the request has read and written, verified by the model.

Answers that quote, extract or edit repeat runs of their prompt. Where the last tokens have occurred before, the tokens
that followed them there are a draft (Saxena, "Prompt Lookup Decoding", 2023; vLLM's n-gram speculator). The engine runs
the draft's tokens beside the next one in the same step: row *i* gives the distribution after *i* accepted tokens. A
draft is certain, so drawing from that distribution and going on while the draw equals the draft keeps the distribution
exactly (Leviathan et al., 2023, with a point mass as proposal), and draws happen in the order they would without.

Whether a draft pays is reckoned a step: its *k*-th token is used with probability ``p^k`` (``p`` is learned for each
sequence) and makes the step longer for all ``n`` sequences by a share ``m`` (learned by batch size). It is drafted
while ``p^k > n * m``. Where drafts fail, ``p`` falls until only a rare probe is left.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from gateway.engine.drafter import Drafter, moved
from gateway.engine.grammar import GrammarError
from gateway.engine.scheduler import Scheduled
from gateway.engine.sequence import Sequence

_PRIOR_WEIGHT = 0.05  # of a new outcome in the rate that new sequences begin with
_COST_WEIGHT = 0.1
_FIRST_COST = 0.1  # share of a step that a draft token costs, before one was observed
_COST_BOUNDS = (0.005, 0.5)


class StepCost:
    """What a draft token adds to a step, as a share of the step without drafts, by number of sequences."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        self._share: dict[int, float] = {}

    def observe(self, sequences: int, drafted: int, seconds: float) -> None:
        """A step of nothing but decodes took so long."""
        plain = self._plain.get(sequences)
        if not drafted:
            self._plain[sequences] = seconds if plain is None else plain + _COST_WEIGHT * (seconds - plain)
        elif plain is not None:
            low, high = _COST_BOUNDS
            share = min(high, max(low, (seconds / plain - 1) / drafted))
            self._share[sequences] = self.share(sequences) + _COST_WEIGHT * (share - self.share(sequences))

    def share(self, sequences: int) -> float:
        return self._share.get(sequences, _FIRST_COST)


class Speculator:
    """Gives a step's decodes their drafts and keeps the counts.

    Owned by the engine thread; the counts may be read from any.

    Args:
        page_size: slots a page of the arena. Drafts never take a page.
        max_model_len: most tokens of a sequence.
    """

    def __init__(self, page_size: int, max_model_len: int) -> None:
        self._page_size = page_size
        self._max_model_len = max_model_len
        self._acceptance = 0.5  # that a new sequence begins with: as it went for others of late
        self.cost = StepCost()
        self.drafted = 0
        self.accepted = 0

    def drafter(self) -> Drafter:
        return Drafter(self._max_model_len, min(0.6, max(0.1, self._acceptance)))

    def with_drafts(self, plan: list[Scheduled]) -> list[Scheduled]:
        """The plan, with tokens to try for decoding sequences where that pays."""
        decodes = sum(item.sequence.decoding for item in plan)
        price = decodes * self.cost.share(decodes)  # tokens lost to all of them by one draft token
        return [replace(item, draft=tuple(self._draft(item.sequence, price))) for item in plan]

    def learn(self, drafter: Drafter, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        drafter.learn(drafted, accepted)
        self._acceptance = moved(self._acceptance, _PRIOR_WEIGHT, drafted, accepted)

    def _draft(self, sequence: Sequence, price: float) -> list[int]:
        if sequence.drafter is None or not sequence.decoding:
            return []
        sampling, lease = sequence.request.sampling, sequence.lease
        assert lease is not None
        most = min(
            sampling.max_tokens - sequence.answer_length - 1,
            self._max_model_len - len(sequence.tokens) - 1,
            len(lease.pages) * self._page_size - len(sequence.tokens),
        )
        draft = until_end(sequence.drafter.draft(sequence.tokens, most, price), sequence.end_ids)
        if draft and sequence.matcher is not None:
            try:
                draft = draft[: sequence.matcher.accepted(draft)]
            except GrammarError:  # comes up again, and ends this one sequence, when its next token is drawn
                return []
        return draft


def until_end(draft: Seq[int], end_ids: frozenset[int]) -> list[int]:
    """The draft up to its first end token: the row before that one draws it anyway, and nothing follows it."""
    return list(draft[: next((i for i, token in enumerate(draft) if token in end_ids), len(draft))])
