"""Load, recompute, or split: a hit must never take longer than no cache at all.

Costs are learned while serving. Loading a chunk from a tier takes ``bytes / rate`` (a moving average per tier).
Computing tokens ``[a, b)`` takes ``linear * (b - a) + square * (b^2 - a^2) / 2``: matrix products grow with the tokens,
attention with the tokens times their context. Both factors come from recursive least squares with forgetting.

The KV of a token needs that of all before it, so what can be chosen is how many leading chunks are loaded; the rest is
computed. The choice is made anew before each chunk, with what the chunks before it have shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.tiers.base import TierName

#: A tier that was found too slow is tried with one chunk again after this long: disks and machines recover.
RETRY_SECONDS = 60.0

_RATE_WEIGHT = 0.3  # of a new observation
_FORGETTING = 0.98
_MIN_OBSERVED_TOKENS = 32  # shorter steps measure overhead, not the rate


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a hit, in order: where it would come from, and its size."""

    tier: TierName
    n_tokens: int
    n_bytes: int


class ComputeModel:
    """Seconds to compute the KV of tokens, from observed prefill steps."""

    def __init__(self) -> None:
        self._xx = self._xy = self._yy = self._xt = self._yt = 0.0

    @property
    def known(self) -> bool:
        return self._xx > 0

    def observe(self, start: int, n_tokens: int, seconds: float) -> None:
        x, y = float(n_tokens), n_tokens * (start + n_tokens / 2)
        self._xx = _FORGETTING * self._xx + x * x
        self._xy = _FORGETTING * self._xy + x * y
        self._yy = _FORGETTING * self._yy + y * y
        self._xt = _FORGETTING * self._xt + x * seconds
        self._yt = _FORGETTING * self._yt + y * seconds

    def seconds(self, start: int, end: int) -> float:
        linear, square = self._factors()
        n_tokens = end - start
        return linear * n_tokens + square * n_tokens * (start + end) / 2

    def _factors(self) -> tuple[float, float]:
        determinant = self._xx * self._yy - self._xy * self._xy
        if determinant > 1e-6 * self._xx * self._yy:  # else all steps had one context: one factor is all they tell
            linear = (self._xt * self._yy - self._yt * self._xy) / determinant
            square = (self._yt * self._xx - self._xt * self._xy) / determinant
            if linear >= 0 and square >= 0:
                return linear, square
            if linear < 0:
                return 0.0, self._yt / self._yy
        return self._xt / self._xx, 0.0


class Planner:
    """Learns the tiers' and the model's speed and says how much of a hit to load. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._compute = ComputeModel()
        self._seconds_per_byte: dict[TierName, float] = {}
        self._observed: dict[TierName, float] = {}

    def observe_load(self, tier: TierName, n_bytes: int, seconds: float) -> None:
        """A chunk came into the arena from a tier."""
        with self._lock:
            new = seconds / max(1, n_bytes)
            old = self._seconds_per_byte.get(tier)
            self._seconds_per_byte[tier] = new if old is None else old + _RATE_WEIGHT * (new - old)
            self._observed[tier] = self._clock()

    def observe_compute(self, start: int, n_tokens: int, seconds: float) -> None:
        """A step computed ``n_tokens`` of one sequence from position ``start`` on, and nothing else."""
        if n_tokens >= _MIN_OBSERVED_TOKENS:
            with self._lock:
                self._compute.observe(start, n_tokens, seconds)

    def compute_seconds(self, start: int, end: int) -> float | None:
        """Expected time to compute the KV of positions ``[start, end)``; None before anything was observed."""
        with self._lock:
            return self._compute.seconds(start, end) if self._compute.known else None

    def parts_to_load(self, parts: Sequence[Part], position: int) -> int:
        """How many leading ``parts``, the first of which begins at token ``position``, to load.

        What isn't loaded is computed. Parts on the device cost nothing. Without observations everything is loaded:
        loading is what shows how fast it is.
        """
        with self._lock:
            if not self._compute.known:
                return len(parts)
            ends = [position]
            for part in parts:
                ends.append(ends[-1] + part.n_tokens)
            best = 0
            least, loading = self._compute.seconds(position, ends[-1]), 0.0
            for loaded, part in enumerate(parts, 1):
                loading += self._load_seconds(part)
                total = loading + self._compute.seconds(ends[loaded], ends[-1])
                if total <= least:
                    best, least = loaded, total
            if best == 0 and parts and self._is_stale(parts[0].tier):
                return 1
            return best

    def _load_seconds(self, part: Part) -> float:
        return 0.0 if part.tier is TierName.GPU else self._seconds_per_byte.get(part.tier, 0.0) * part.n_bytes

    def _is_stale(self, tier: TierName) -> bool:
        now = self._clock()
        if now - self._observed.get(tier, now) < RETRY_SECONDS:
            return False
        self._observed[tier] = now  # one request tries, the others don't
        return True
