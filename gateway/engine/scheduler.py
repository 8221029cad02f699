"""What runs in the next step: admission, chunked prefill at chunk boundaries, decodes every step, preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gateway.engine.sequence import Sequence, SequenceState
from kvstore.store import PrefixStore


@dataclass(frozen=True, slots=True)
class Scheduled:
    """``n_tokens`` of a sequence from its ``computed`` position on; ``last`` when its logits are needed.

    ``draft``: tokens to try after a decode's own one.
    """

    sequence: Sequence
    n_tokens: int
    draft: tuple[int, ...] = ()

    @property
    def last(self) -> bool:
        return self.n_tokens == self.sequence.remaining


class Scheduler:
    """Queues and the plan of a step. Owned by the engine thread.

    Every running sequence that decodes takes part in every step. Prefill is first come, first served under a
    token budget, and a piece never crosses a chunk boundary, so that a hit and a cold run compute the same pieces.

    Args:
        store: where page tables grow.
        chunk_size: tokens a page.
        max_batch_size: sequences admitted (running or loading) at once.
        prefill_tokens: prefill budget of a step; 0 = one chunk while others decode, two otherwise.
        publish: keeps what a preempted sequence has computed.
    """

    def __init__(
        self,
        store: PrefixStore,
        *,
        chunk_size: int,
        max_batch_size: int,
        publish: Callable[[Sequence], None],
        prefill_tokens: int = 0,
    ) -> None:
        self._store = store
        self._publish = publish
        self._chunk_size = chunk_size
        self._max_batch_size = max_batch_size
        self._prefill_tokens = prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.loading: list[Sequence] = []
        self.running: list[Sequence] = []
        self._crowded = False  # set by a preemption: admitting again before a page comes free would thrash

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into loading while there is room; the caller looks their prefixes up.

        A prompt whose beginning is being computed by another sequence waits for it and then finds it in the cache,
        instead of computing it as well; when the other one ends early, it takes over.
        """
        admitted: list[Sequence] = []
        if self._crowded and self.running:
            return admitted
        held: list[Sequence] = []
        while self.waiting and len(self.running) + len(self.loading) < self._max_batch_size:
            sequence = self.waiting.popleft()
            if self._follows(sequence):
                held.append(sequence)
                continue
            sequence.state = SequenceState.LOADING
            self.loading.append(sequence)
            admitted.append(sequence)
        self.waiting.extendleft(reversed(held))
        return admitted

    def _follows(self, sequence: Sequence) -> bool:
        """Whether whole chunks that it needs are on the way in a sequence of its namespace."""
        if not sequence.request.use_cache:
            return False
        return any(
            other.computed < other.prompt_length
            and other.request.use_cache
            and other.request.namespace == sequence.request.namespace
            and other.computed < self._shared_tokens(sequence, other)
            for other in (*self.running, *self.loading)
        )

    def _shared_tokens(self, sequence: Sequence, other: Sequence) -> int:
        """Leading tokens that both prompts have, in whole chunks."""
        known = sequence.shared.get(other.request.request_id)
        if known is None:
            mine, theirs, size = sequence.request.prompt_ids, other.request.prompt_ids, self._chunk_size
            known, limit = 0, min(len(mine), len(theirs))
            while known + size <= limit and mine[known : known + size] == theirs[known : known + size]:
                known += size
            sequence.shared[other.request.request_id] = known
        return known

    def loaded(self, sequence: Sequence) -> None:
        self.loading.remove(sequence)
        sequence.state = SequenceState.RUNNING
        self.running.append(sequence)

    def plan(self) -> list[Scheduled]:
        """The next step. Sequences for which no page can be had are preempted, youngest first."""
        plan: list[Scheduled] = []
        for sequence in [s for s in self.running if s.decoding]:
            if sequence.state is SequenceState.RUNNING and self._make_room(sequence, 1, plan):
                plan.append(Scheduled(sequence, 1))
        budget = self._prefill_tokens or self._chunk_size * (1 if plan else 2)
        for sequence in [s for s in self.running if not s.decoding]:
            if budget <= 0:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue
            to_boundary = self._chunk_size - sequence.computed % self._chunk_size
            n_tokens = min(sequence.remaining, to_boundary)
            if plan and n_tokens > budget:
                break
            if self._make_room(sequence, n_tokens, plan):
                plan.append(Scheduled(sequence, n_tokens))
                budget -= n_tokens
        return plan

    def _make_room(self, sequence: Sequence, n_tokens: int, plan: list[Scheduled]) -> bool:
        """Grow the page table; younger sequences not yet in the plan give way. False: wait for older ones."""
        assert sequence.lease is not None
        while not self._store.reserve(sequence.lease, sequence.computed + n_tokens):
            planned = {id(item.sequence) for item in plan}
            younger = self.running[self.running.index(sequence) + 1 :]
            victim = next((s for s in reversed(younger) if id(s) not in planned), None)
            if victim is None:
                return False
            self.preempt(victim)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Give its pages back and queue it first; what it computed stays cached, so little is lost."""
        assert sequence.lease is not None
        self._publish(sequence)
        self._store.release(sequence.lease)
        sequence.lease = None
        sequence.computed = 0
        sequence.state = SequenceState.WAITING
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self._crowded = True

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or cancelled sequence, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._crowded = False
        elif sequence in self.loading:
            self.loading.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED
