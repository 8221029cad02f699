"""Drafts from a sequence's own tokens, and whether they pay (see ``speculation``)."""

from __future__ import annotations

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
        self._acceptance = moved(self._acceptance, _ACCEPTANCE_WEIGHT, drafted, accepted)
        self._pause = _FIRST_PAUSE if accepted else min(2 * self._pause, _LONGEST_PAUSE)

    def _take(self, tokens: list[int]) -> NDArray[np.int32]:
        if self._tokens is None:
            self._tokens = np.empty(self._capacity, dtype=np.int32)
        self._tokens[self._known : len(tokens)] = tokens[self._known :]
        self._known = len(tokens)
        return self._tokens[: self._known]


def moved(rate: float, weight: float, drafted: int, accepted: int) -> float:
    """A moving average of acceptance after ``accepted`` of ``drafted`` tokens; those after a refusal show nothing."""
    for outcome in [1.0] * accepted + [0.0] * (accepted < drafted):
        rate += weight * (outcome - rate)
    return rate
