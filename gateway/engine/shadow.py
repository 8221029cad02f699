"""Shadow verification: a sample of hits is computed again when the engine is idle, and compared with the cache."""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from dataclasses import dataclass

import torch

from gateway.engine.runner import ModelRunner, Work
from kvstore.store import Lease, PrefixStore
from kvstore.tiers.device import DeviceArena

log = logging.getLogger(__name__)

#: Largest relative difference (Frobenius norm) of a chunk's KV that rounding explains: other pieces of prefill, or
#: decoding instead of prefill, round otherwise. KV of another prompt or model differs by about 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}

_MAX_WAITING = 8


@dataclass(slots=True)
class _Job:
    tokens: list[int]
    namespace: str
    lease: Lease | None = None
    computed: int = 0


class ShadowVerifier:
    """Owned by the engine thread. ``share`` of the hits is checked; busy times drop checks, never delay answers."""

    def __init__(self, store: PrefixStore, runner: ModelRunner, arena: DeviceArena, share: float) -> None:
        self._store = store
        self._runner = runner
        self._arena = arena
        self._share = share
        self._random = random.Random()
        self._waiting: deque[_Job] = deque(maxlen=_MAX_WAITING)
        #: Checks by outcome: ``match``, ``mismatch``, ``skipped`` (interrupted by a request, no room, or evicted).
        self.outcomes: Counter[str] = Counter()

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    def consider(self, tokens: list[int], namespace: str) -> None:
        """A request hit these tokens."""
        if self._share and tokens and self._random.random() < self._share:
            self._waiting.append(_Job(tokens, namespace))

    def step(self) -> None:
        """One piece of work on the oldest check: compute a chunk again, or compare."""
        job = self._waiting[0]
        if job.lease is None:
            job.lease = self._store.begin(job.tokens, job.namespace, use_cache=False, counted=False)
        if job.computed < len(job.tokens):
            chunk = self._arena.layout.chunk_size
            end = min((job.computed // chunk + 1) * chunk, len(job.tokens))
            if not self._store.reserve(job.lease, end):
                self._end("skipped")
                return
            self._runner.forward([Work(job.tokens[job.computed : end], job.computed, job.lease.pages, False)])
            job.computed = end
        else:
            self._end(self._compare(job, job.lease))

    def abandon(self) -> None:
        """A request wants the engine: give the pages back, and don't try this one again."""
        if self._waiting and self._waiting[0].lease is not None:
            self._end("skipped")

    def close(self) -> None:
        self.abandon()
        self._waiting.clear()

    def _end(self, outcome: str) -> None:
        job = self._waiting.popleft()
        if job.lease is not None:
            self._store.release(job.lease)
        self.outcomes[outcome] += 1

    def _compare(self, job: _Job, fresh: Lease) -> str:
        chunk, tokens = self._arena.layout.chunk_size, job.tokens
        cached = self._store.begin([*tokens, 0], job.namespace, counted=False)
        bad: int | None = None
        try:
            self._store.load(cached)
            for index in range(-(-cached.hit_tokens // chunk)):
                n_tokens = min(chunk, cached.hit_tokens - index * chunk)
                wanted = self._arena.page_view(fresh.pages[index], n_tokens).float()
                found = self._arena.page_view(cached.pages[index], n_tokens).float()
                difference = float((found - wanted).norm() / wanted.norm().clamp_min(1e-12))
                if not difference <= TOLERANCE[self._arena.layout.dtype]:
                    bad = index
                    break
            outcome = "match" if cached.hit_tokens else "skipped"
        finally:
            self._store.release(cached)
        if bad is None:
            return outcome
        log.error(
            "shadow verification: cached KV of tokens %d.. of a prompt differs from its recomputation by %.3g "
            "(relative norm); the chunk and what hangs from it are dropped. Please report this with the model's name.",
            bad * chunk,
            difference,
        )
        self._store.forget(tokens[: (bad + 1) * chunk], job.namespace)
        return "mismatch"
