"""The engine's contract with the HTTP layer: what goes in, what comes out, what can go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gateway.engine.grammar import Grammar


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # cancelled by the caller; never sent to a client
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Already validated sampling settings of one sequence (ranges as in the OpenAI and vLLM APIs).

    ``temperature == 0`` is greedy. ``max_tokens`` is a count that fits the context (the API layer clamps).
    ``stop_token_ids`` adds to the model's own end tokens. ``logit_bias`` maps token id to [-100, 100].
    ``logprobs`` asks for the log-probability of each answer token and of that many best alternatives; None = off.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    request_id: str  # fresh and unique: never the client's own id
    prompt_ids: list[int]
    sampling: SamplingParams
    namespace: str = ""  # tenant namespace of the prefix cache, derived in the server
    use_cache: bool = True
    pin_seconds: float | None = None  # keep the prompt's chunks from eviction for this long after the answer
    grammar: Grammar | None = None  # what the answer must look like
    shown_tokens: frozenset[int] = frozenset()  # special tokens that are part of the answer's text


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Where the prompt's KV came from, in tokens. ``gpu + cpu + disk == cached_tokens <= prompt_tokens - 1``."""

    prompt_tokens: int
    gpu: int = 0
    cpu: int = 0
    disk: int = 0

    @property
    def cached_tokens(self) -> int:
        return self.gpu + self.cpu + self.disk


@dataclass(frozen=True, slots=True)
class Started:
    """First event of every request: the prefix was looked up and loaded, computing begins."""

    cache: CacheReport


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural) at one position of an answer, of the model's own distribution.

    That is ``log_softmax`` of the raw logits, in float32: before bias, penalties, temperature, cuts and grammar masks,
    as in vLLM's default. ``top`` holds (token id, log-probability) pairs, best first; the chosen token may be missing.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer. ``text`` is always whole characters and never part of a stop string.

    ``logprobs`` has an entry a token when asked for, but none for the end token, which is no part of the answer.
    ``stop_string`` is the one that ended the answer, with the last piece.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One finished request, for the log line and the histograms. Times in seconds."""

    request_id: str
    cache: CacheReport
    completion_tokens: int
    finish_reason: FinishReason
    queue_s: float  # submit -> admitted
    ttft_s: float | None  # submit -> first token; None when none was made
    tpot_s: float | None  # mean gap between tokens after the first; None below two tokens


class EngineError(Exception):
    """Base of what the engine raises to callers; ``status`` is the HTTP status the API layer answers."""

    status = 500
    code = "engine_error"


class ContextLengthExceeded(EngineError):
    status = 400
    code = "context_length_exceeded"


class EngineOverloaded(EngineError):
    """No room to queue (or no memory for the request right now): retry later."""

    status = 503
    code = "engine_overloaded"
    retry_after_s = 1


class EngineClosed(EngineError):
    status = 503
    code = "shutting_down"
    retry_after_s = 5


class EngineObserver(Protocol):
    """Called from the engine thread: must be quick and never raise."""

    def request_finished(self, report: RequestReport) -> None: ...

    def step_finished(self, seconds: float, prefill_tokens: int, decode_tokens: int) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    running: int
    waiting: int
    loading: int
    shadow_checks: Mapping[str, int] = field(default_factory=dict)  # by outcome, see ShadowVerifier
    drafted_tokens: int = 0  # by speculation, and how many of them the model took
    accepted_tokens: int = 0
