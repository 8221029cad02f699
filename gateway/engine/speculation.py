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

import numpy as np
from numpy.typing import NDArray

#: Most tokens of one draft.
MAX_DRAFT = 12

#: Fewest tokens that must have occurred before; two-word phrases are everywhere and mostly go on otherwise.
MIN_MATCH = 3

#: Of several earlier places the one with the longest equal past is taken, compared over so many tokens.
_LONGEST_MATCH = 16

#: Most earlier places compared, latest first.
_PLACES = 32

_ACCEPTANCE_WEIGHT = 0.25  # of a new outcome in a sequence's acceptance rate
_PRIOR_WEIGHT = 0.05  # of a new outcome in the rate that new sequences begin with
_COST_WEIGHT = 0.1
_FIRST_COST = 0.1  # share of a step that a draft token costs, before one was observed
_COST_BOUNDS = (0.005, 0.5)

#: A sequence whose drafts don't pay tries one token again after so many steps with a match; doubled by each failure.
_FIRST_PAUSE = 32
_LONGEST_PAUSE = 256


class Drafter:
    """One sequence's tokens, searched for its own last few, and how well its drafts do.

    Args:
        capacity: most tokens the sequence can have.
        acceptance: probability that a draft token is accepted, to begin with.
    """

    def __init__(self, capacity: int, acceptance: float) -> None:
        self._capacity = capacity
        self._tokens: NDArray[np.int32] | None = None  # made with the first lookup, off the way to the first token
        self._known = 0
        self._acceptance = acceptance
        self._pause = _FIRST_PAUSE
        self._waited = 0

    def draft(self, tokens: list[int], most: int, price: float) -> list[int]:
        """Tokens to try after ``tokens``, at most ``most``; ``price`` is what one costs, in tokens."""
        most = min(most, MAX_DRAFT)
        length = 0
        gain = self._acceptance
        while length < most and gain > price:
            length += 1
            gain *= self._acceptance
        probing = length == 0 and most > 0
        if probing and self._waited < self._pause:
            self._waited += 1
            return []
        found = self.lookup(tokens, 1 if probing else length)
        if probing and found:
            self._waited = 0
        return found

    def lookup(self, tokens: list[int], most: int) -> list[int]:
        """What followed the latest of the places whose past is equal to the end of ``tokens`` for longest."""
        if most <= 0 or len(tokens) <= MIN_MATCH:
            return []
        known = self._take(tokens)
        n = len(known)
        # Places p < n where known[p - MIN_MATCH : p] is the end of the text.
        equal = known[MIN_MATCH - 1 : n - 1] == known[n - 1]
        places = np.flatnonzero(equal) + MIN_MATCH
        for back in range(2, MIN_MATCH + 1):
            places = places[known[places - back] == known[n - back]]
        if not len(places):
            return []
        best, longest = 0, 0
        for place in places[: -_PLACES - 1 : -1].tolist():
            reach = min(_LONGEST_MATCH, place)
            differs = np.flatnonzero(known[place - reach : place] != known[n - reach : n])
            match = reach - 1 - int(differs[-1]) if len(differs) else reach
            if match > longest:
                best, longest = place, match
            if longest == _LONGEST_MATCH:
                break
        return [int(token) for token in known[best : best + most]]

    def learn(self, drafted: int, accepted: int) -> None:
        """The model took the first ``accepted`` of ``drafted`` tokens."""
        for outcome in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._acceptance += _ACCEPTANCE_WEIGHT * (outcome - self._acceptance)
        self._pause = _FIRST_PAUSE if accepted else min(2 * self._pause, _LONGEST_PAUSE)

    def _take(self, tokens: list[int]) -> NDArray[np.int32]:
        if self._tokens is None:
            self._tokens = np.empty(self._capacity, dtype=np.int32)
        self._tokens[self._known : len(tokens)] = tokens[self._known :]
        self._known = len(tokens)
        return self._tokens[: self._known]


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
    """Makes drafters and keeps the counts. Owned by the engine thread; the counts may be read from any."""

    def __init__(self) -> None:
        self._cost = StepCost()
        self._acceptance = 0.5  # that a new sequence begins with: as it went for others of late
        self.drafted = 0
        self.accepted = 0

    def drafter(self, capacity: int) -> Drafter:
        return Drafter(capacity, min(0.6, max(0.1, self._acceptance)))

    def price(self, sequences: int) -> float:
        """Tokens lost to all sequences of a step by one draft token."""
        return sequences * self._cost.share(sequences)

    def learn(self, drafter: Drafter, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        drafter.learn(drafted, accepted)
        for outcome in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._acceptance += _PRIOR_WEIGHT * (outcome - self._acceptance)

    def observe_step(self, sequences: int, drafted: int, seconds: float) -> None:
        self._cost.observe(sequences, drafted, seconds)


def until_end(draft: Seq[int], end_ids: frozenset[int]) -> list[int]:
    """The draft up to its first end token: the row before that one draws it anyway, and nothing follows it."""
    return list(draft[: next((i for i, token in enumerate(draft) if token in end_ids), len(draft))])
