"""One running request inside the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from gateway.engine.attention import ProbeSink
from gateway.engine.detokenise import Detokeniser
from gateway.engine.drafter import Drafter
from gateway.engine.grammar import Matcher
from gateway.engine.sampler import Sampler
from gateway.engine.types import CacheReport, Delta, EngineError, FinishReason, GenerationRequest, Started
from kvstore.store import Lease

Event = Started | Delta | EngineError


class SequenceState(Enum):
    WAITING = auto()  # queued, or preempted and queued again
    LOADING = auto()  # its prefix is on the way from lower tiers
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    request: GenerationRequest
    sampler: Sampler
    detokeniser: Detokeniser
    emit: Callable[[Event], None]  # thread-safe hand-over to the waiting caller
    submitted: float
    tokens: list[int]  # prompt, then answer
    end_ids: frozenset[int]  # tokens that end its answer and are not shown
    matcher: Matcher | None = None  # its state in its grammar
    drafter: Drafter | None = None  # None: no speculation
    state: SequenceState = SequenceState.WAITING
    computed: int = 0  # leading tokens whose KV is in the lease's pages
    lease: Lease | None = None
    shared: dict[str, int] = field(default_factory=dict)  # whole-chunk tokens in common, by the other's request id
    cache: CacheReport | None = None  # of the first admission
    probe: ProbeSink | None = None
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finish_reason: FinishReason | None = field(default=None)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens whose KV isn't computed yet; at 1 with a whole prompt done, the sequence is decoding."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return self.remaining == 1 and self.computed >= self.prompt_length
