"""The engine: one thread that steps the model, and the async face that the HTTP layer talks to."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from gateway.engine.attention import ProbeSink
from gateway.engine.detokenise import Detokeniser
from gateway.engine.grammar import Grammar, GrammarCompiler, GrammarError
from gateway.engine.grammar_spec import GrammarSpec
from gateway.engine.loader import LoadedModel
from gateway.engine.memory import HeapTrim, device_memory
from gateway.engine.runner import ModelRunner, Work
from gateway.engine.sampler import Sampler, token_logprobs
from gateway.engine.scheduler import Scheduled, Scheduler
from gateway.engine.sequence import Event, Sequence, SequenceState
from gateway.engine.shadow import ShadowVerifier
from gateway.engine.speculation import Speculator
from gateway.engine.step_timer import StepTimer
from gateway.engine.types import (
    CacheReport,
    ContextLengthExceeded,
    Delta,
    EngineClosed,
    EngineError,
    EngineObserver,
    EngineOverloaded,
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestReport,
    SamplingParams,
    Started,
    TokenLogprobs,
)
from kvstore.replay.record import TraceRecorder
from kvstore.stats import StoreStats
from kvstore.steering import PinLimitExceeded
from kvstore.store import PrefixStore
from kvstore.tiers.base import TierName
from kvstore.tiers.device import DeviceArena

log = logging.getLogger(__name__)

#: Most prompt tokens whose queries are kept to measure importance (the observation window).
OBSERVATION_WINDOW = 64

_LOADER_THREADS = 2


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model_id: str
    aliases: tuple[str, ...] = ()
    max_batch_size: int = 16
    max_waiting: int = 256
    prefill_tokens_per_step: int = 0
    probe_heads: int = 3
    cache_enabled: bool = True
    deterministic: bool = False
    shadow_verify: float = 0.0
    speculation: bool = True


class Engine:
    """Serves generation requests on one model with a prefix cache.

    Args:
        config: limits and names.
        loaded: the model.
        arena: the device tier's memory; running sequences and cached chunks share it.
        store: the prefix cache over that arena.
        observer: told of finished requests and steps.
        clock: monotonic seconds.
        recorder: notes each request that was looked up, as salted hashes; None records nothing.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        arena: DeviceArena,
        store: PrefixStore,
        observer: EngineObserver,
        clock: Callable[[], float] = time.perf_counter,
        recorder: TraceRecorder | None = None,
    ) -> None:
        self.model_id = config.model_id
        self.aliases = config.aliases
        self.max_model_len = loaded.max_model_len
        self.created = int(time.time())
        self.tokenizer = loaded.tokenizer
        self.vocab_size = loaded.vocab_size
        self._config = config
        self._loaded = loaded
        self._arena = arena
        self._store = store
        self._observer = observer
        self._clock = clock
        self._recorder = recorder
        self._runner = ModelRunner(loaded, arena, deterministic=config.deterministic)
        self._timer = StepTimer(loaded.device, clock)
        self._heap = HeapTrim(clock)
        self._shadow = ShadowVerifier(store, self._runner, arena, config.shadow_verify)
        # A step with drafts has other rows than one without, and so another rounding.
        self._speculator = (
            Speculator(arena.layout.chunk_size, loaded.max_model_len)
            if config.speculation and not config.deterministic
            else None
        )
        self._scheduler = Scheduler(
            store,
            chunk_size=arena.layout.chunk_size,
            max_batch_size=config.max_batch_size,
            publish=lambda sequence: self._publish(sequence, final=True),
            prefill_tokens=config.prefill_tokens_per_step,
        )
        self._probe_heads = spread_heads(config.probe_heads, loaded.geometry.heads, loaded.geometry.kv_heads)
        self._model_bytes = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
        self._grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
        self._by_id: dict[str, Sequence] = {}
        self._wake = threading.Condition()
        self._inbox: list[Sequence] = []
        self._cancelled: list[str] = []
        self._loads_done: list[tuple[Sequence, Exception | None]] = []
        self._closing = False
        self._loaders = ThreadPoolExecutor(_LOADER_THREADS, thread_name_prefix="kvgate-load")
        self._thread = threading.Thread(target=self._run, name="kvgate-engine", daemon=True)

    # The async face -------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def cache(self) -> PrefixStore | None:
        return self._store if self._config.cache_enabled else None

    async def start(self) -> None:
        self._thread.start()

    async def close(self) -> None:
        """Stop stepping, end running requests with EngineClosed, write the cache's state, free the folder."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._loaders.shutdown)
        self._grammars.close()
        await asyncio.to_thread(self._store.close)
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Started | Delta, None]:
        """Run a request: first Started, then Deltas, the last with a finish_reason. Closing it cancels the work.

        Raises:
            ContextLengthExceeded, EngineOverloaded, EngineClosed: it can't run.
            EngineError: a step failed.
        """
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        self._submit(request, emit)
        finished = False
        try:
            while not finished:
                event = await events.get()
                if isinstance(event, EngineError):
                    finished = True
                    raise event
                finished = isinstance(event, Delta) and event.finish_reason is not None
                yield event
        finally:
            if not finished:
                self._cancel(request.request_id)

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        """Make a grammar ready for ``GenerationRequest.grammar``. Blocks for up to seconds; from any thread.

        Raises:
            GrammarError: malformed, too large or too complex.
        """
        return self._grammars.compile(spec)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._inbox),
            loading=len(scheduler.loading),
            shadow_checks=dict(self._shadow.outcomes),
            drafted_tokens=self._speculator.drafted if self._speculator else 0,
            accepted_tokens=self._speculator.accepted if self._speculator else 0,
        )

    def store_stats(self) -> StoreStats:
        return self._store.stats()

    def memory(self) -> dict[str, int]:
        arena_bytes = self._arena.kv.numel() * self._arena.kv.element_size()
        return device_memory(self._loaded.device, arena_bytes, self._model_bytes)

    def degraded(self) -> list[str]:
        """Why service is reduced, one sentence each; empty when all is well."""
        usage = self._store.stats().usage
        return [f"{name} tier is read-only: {tier.detail}" for name, tier in usage.items() if tier.read_only]

    def _submit(self, request: GenerationRequest, emit: Callable[[Event], None]) -> None:
        if len(request.prompt_ids) >= self.max_model_len:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.max_model_len} tokens, but the prompt has "
                f"{len(request.prompt_ids)}; shorten the prompt"
            )
        sequence = Sequence(
            request=request,
            sampler=Sampler(request.sampling, request.prompt_ids, self.vocab_size, self._loaded.device),
            detokeniser=Detokeniser(
                self.tokenizer, request.prompt_ids, request.sampling.stop, shown=request.shown_tokens
            ),
            emit=emit,
            submitted=self._clock(),
            tokens=list(request.prompt_ids),
            end_ids=self._end_ids(request.sampling),
            matcher=request.grammar.matcher() if request.grammar is not None else None,
            drafter=self._speculator.drafter() if self._speculator else None,
        )
        with self._wake:
            if self._closing:
                raise EngineClosed("the server is shutting down; send the request again in a few seconds")
            if len(self._scheduler.waiting) + len(self._inbox) >= self._config.max_waiting:
                raise EngineOverloaded(
                    f"{self._config.max_waiting} requests are waiting already; retry later, or raise "
                    "[limits].max_waiting"
                )
            self._inbox.append(sequence)
            self._wake.notify_all()

    def _end_ids(self, sampling: SamplingParams) -> frozenset[int]:
        eos = frozenset() if sampling.ignore_eos else frozenset(self._loaded.eos_token_ids)
        return eos | frozenset(sampling.stop_token_ids)

    def _cancel(self, request_id: str) -> None:
        with self._wake:
            self._cancelled.append(request_id)
            self._wake.notify_all()

    # The engine thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._heap.trim_if_due(idle=not self._by_id)
            with self._wake:
                while not (self._closing or self._has_work() or self._is_idle()):
                    self._wake.wait()
                if self._closing:
                    break
                idle = self._is_idle()
                inbox, self._inbox = self._inbox, []
                cancelled, self._cancelled = self._cancelled, []
                loads, self._loads_done = self._loads_done, []
            if idle:
                self._check_in_the_shadow()
                continue
            self._shadow.abandon()
            self._take(inbox, cancelled, loads)
            self._step()
        self._shadow.close()
        self._end_all(EngineClosed("the server is shutting down; send the request again in a few seconds"))

    def _has_work(self) -> bool:
        return bool(self._inbox or self._cancelled or self._loads_done or self._runnable())

    def _is_idle(self) -> bool:
        """Nothing to do for anybody, and a check is waiting for such a moment."""
        return self._shadow.pending and not (self._has_work() or self._scheduler.loading)

    def _check_in_the_shadow(self) -> None:
        try:
            self._shadow.step()
        except Exception:
            log.exception("shadow verification failed; the check is left out")
            self._shadow.close()

    def _runnable(self) -> bool:
        return bool(self._scheduler.running) or bool(self._scheduler.waiting and not self._scheduler.loading)

    def _take(
        self, inbox: list[Sequence], cancelled: list[str], loads: list[tuple[Sequence, Exception | None]]
    ) -> None:
        for sequence in inbox:
            self._by_id[sequence.request.request_id] = sequence
            self._scheduler.waiting.append(sequence)
        for sequence, error in loads:
            self._begin_running(sequence, error)
        for request_id in cancelled:
            if (cancelled_one := self._by_id.get(request_id)) is not None:
                self._finish(cancelled_one, FinishReason.ABORT)
        for sequence in self._scheduler.admit():
            self._begin_loading(sequence)

    def _begin_loading(self, sequence: Sequence) -> None:
        if sequence.admitted is None:
            sequence.admitted = self._clock()
        request = sequence.request
        lease = self._store.begin(
            sequence.tokens,
            request.namespace,
            use_cache=request.use_cache and self._config.cache_enabled,
            # A hit inside a chunk would make the pieces of the prefill, and so its rounding, other than cold.
            whole_chunks=self._config.deterministic,
        )
        sequence.lease = lease

        def load() -> None:
            error: Exception | None = None
            try:
                self._store.load(lease)
            except Exception as caught:
                error = caught
            with self._wake:
                self._loads_done.append((sequence, error))
                self._wake.notify_all()

        self._loaders.submit(load)

    def _begin_running(self, sequence: Sequence, error: Exception | None) -> None:
        lease = sequence.lease
        assert lease is not None
        if sequence.finish_reason is not None:  # cancelled while loading: the lease could not end before the load
            self._store.release(lease)
            return
        if error is not None:
            log.error("loading a prefix failed; computing it instead", exc_info=error)
            self._store.release(lease)
            lease = sequence.lease = self._store.begin(sequence.tokens, sequence.request.namespace, use_cache=False)
        self._scheduler.loaded(sequence)
        sequence.computed = lease.hit_tokens
        if sequence.cache is None:
            hits = lease.hits
            sequence.cache = CacheReport(
                prompt_tokens=sequence.prompt_length,
                gpu=hits.get(TierName.GPU, 0),
                cpu=hits.get(TierName.CPU, 0),
                disk=hits.get(TierName.DISK, 0),
            )
            sequence.emit(Started(sequence.cache))

    def _step(self) -> None:
        plan = self._scheduler.plan()
        if not plan:
            self._resolve_stall()
            return
        started = self._clock()
        try:
            if self._speculator is not None:
                plan = self._speculator.with_drafts(plan)
            work = [work for item in plan for work in self._work(item)]
            self._timer.start()
            logits = self._runner.forward(work)
            self._observe_speed(plan)
            self._advance(plan, logits)
        except Exception:
            log.exception("an engine step failed; its requests are ended")
            for item in plan:
                self._fail(item.sequence, EngineError("the engine failed on this request; see the server's log"))
        decodes = sum(1 + len(item.draft) for item in plan if item.n_tokens == 1)
        tokens = sum(item.n_tokens + len(item.draft) for item in plan)
        self._observer.step_finished(self._clock() - started, tokens - decodes, decodes)

    def _observe_speed(self, plan: list[Scheduled]) -> None:
        """Tell the planner how long a piece of prefill took that had the step for itself, and what drafts cost."""
        if len(plan) == 1 and plan[0].n_tokens > 1:
            start, n_tokens = plan[0].sequence.computed, plan[0].n_tokens
            self._timer.stop(lambda seconds: self._store.planner.observe_compute(start, n_tokens, seconds))
        elif (speculator := self._speculator) is not None and all(item.sequence.decoding for item in plan):
            drafted = sum(len(item.draft) for item in plan)
            self._timer.stop(lambda seconds: speculator.cost.observe(len(plan), drafted, seconds))

    def _resolve_stall(self) -> None:
        """Nothing could be planned. With loads in flight that passes; otherwise no page will ever come free."""
        scheduler = self._scheduler
        if scheduler.loading:
            with self._wake:
                if not self._loads_done:
                    self._wake.wait(timeout=0.05)
        elif scheduler.running:
            self._fail(
                scheduler.running[0],
                EngineOverloaded(
                    "the KV arena has no room for this request; retry later, unpin prefixes or raise "
                    "[prefix_cache].device_cache_gb"
                ),
            )

    def _work(self, item: Scheduled) -> list[Work]:
        """The item's rows: its tokens, then each draft token by itself, so that its logits are had as a decode's are.

        All rows of a step write their KV before any attends, so a draft token sees those before it.
        """
        sequence = item.sequence
        assert sequence.lease is not None
        start, end = sequence.computed, sequence.computed + item.n_tokens
        ends_prompt = item.last and end == sequence.prompt_length
        if ends_prompt and item.n_tokens > 1 and self._config.cache_enabled and self._probe_heads:
            sequence.probe = ProbeSink(self._probe_heads, min(OBSERVATION_WINDOW, item.n_tokens))
        pages = sequence.lease.pages
        own = Work(
            token_ids=sequence.tokens[start:end],
            start=start,
            pages=pages,
            wants_logits=item.last,
            probe=sequence.probe if ends_prompt else None,
        )
        return [own, *(Work([token], end + i, pages, wants_logits=True) for i, token in enumerate(item.draft))]

    def _advance(self, plan: list[Scheduled], logits: torch.Tensor) -> None:
        row = 0
        greedy = logits.argmax(-1).tolist() if len(logits) else []
        for item in plan:
            sequence = item.sequence
            last = item.last
            self._computed(sequence, item.n_tokens)
            if not last:
                continue
            try:
                self._accept(item, logits[row:], greedy[row:])
            except GrammarError as error:
                self._fail(sequence, error)
            row += 1 + len(item.draft)

    def _computed(self, sequence: Sequence, n_tokens: int) -> None:
        """The KV of the next ``n_tokens`` of its tokens is there; a chunk that became whole is published."""
        chunk = self._arena.layout.chunk_size
        before = sequence.computed
        sequence.computed += n_tokens
        if sequence.computed // chunk > before // chunk:
            self._publish(sequence)

    def _accept(self, item: Scheduled, logits: torch.Tensor, greedy: list[int]) -> None:
        """Draw the next token, and further ones while the draft is what was drawn.

        The KV of a draft token counts as computed only once the token was drawn: what was refused is never published,
        and the next step writes over it.
        """
        sequence = item.sequence
        top = sequence.request.sampling.logprobs
        accepted = 0
        for row in range(1 + len(item.draft)):
            token = self._choose(sequence, logits[row], greedy[row])
            logprobs = None if top is None else token_logprobs(logits[row], token, top)
            self._append(sequence, token, logprobs)
            if row == len(item.draft) or token != item.draft[row]:
                break
            accepted += 1
            if sequence.finish_reason is not None:
                break
            self._computed(sequence, 1)
        if item.draft:
            assert self._speculator is not None and sequence.drafter is not None
            self._speculator.learn(sequence.drafter, len(item.draft), accepted)

    def _choose(self, sequence: Sequence, logits: torch.Tensor, best: int) -> int:
        """The next token, from its row of logits; ``best`` is the row's argmax."""
        if sequence.matcher is not None:
            return sequence.sampler.sample(logits, sequence.matcher.forbidden())
        if not sequence.sampler.is_plain_greedy:
            return sequence.sampler.sample(logits)
        sequence.sampler.note(best)
        return best

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None = None) -> None:
        now = self._clock()
        if sequence.first_token is None:
            sequence.first_token = now
        sequence.last_token = now
        sequence.tokens.append(token)
        sampling = sequence.request.sampling
        is_end = token in sequence.end_ids
        text = "" if is_end else sequence.detokeniser.add(token)
        reason: FinishReason | None = None
        if not is_end and sequence.matcher is not None:
            sequence.matcher.accept(token)
        if is_end or sequence.detokeniser.stopped or (sequence.matcher is not None and sequence.matcher.done):
            reason = FinishReason.STOP
        elif sequence.answer_length >= sampling.max_tokens or len(sequence.tokens) >= self.max_model_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            text += sequence.detokeniser.finish()
        shown = () if logprobs is None or is_end else (logprobs,)
        sequence.emit(Delta(text, (token,), reason, shown, sequence.detokeniser.stop_string))
        if reason is not None:
            self._finish(sequence, reason)

    def _fail(self, sequence: Sequence, error: EngineError) -> None:
        sequence.emit(error)
        self._finish(sequence, FinishReason.ERROR)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, whatever the ending: keep what it computed, give its lease back, report it."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        was_loading = sequence.state is SequenceState.LOADING
        self._scheduler.remove(sequence)
        self._by_id.pop(sequence.request.request_id, None)
        if sequence.lease is not None and not was_loading:
            try:
                if reason is not FinishReason.ERROR:
                    self._keep(sequence)
            finally:
                self._store.release(sequence.lease)
            if sequence.cache is not None and reason is not FinishReason.ERROR:
                hit = sequence.tokens[: sequence.cache.cached_tokens]
                self._shadow.consider(hit, sequence.request.namespace)
            if self._recorder is not None and sequence.lease.caching:
                prompt = sequence.tokens[: sequence.prompt_length]
                self._recorder.record(sequence.request.namespace, prompt, sequence.answer_length)
        self._report(sequence, reason)

    def _keep(self, sequence: Sequence) -> None:
        """Publish the computed tokens and measure which prompt tokens mattered, off the answer's critical path."""
        lease, probe = sequence.lease, sequence.probe
        assert lease is not None
        self._publish(sequence, final=True)
        if (seconds := sequence.request.pin_seconds) is not None:
            try:
                self._store.pin(sequence.request.prompt_ids, sequence.request.namespace, ttl=seconds)
            except PinLimitExceeded as error:
                log.warning("a prompt with prompt_cache_retention is not pinned: %s", error)
        if probe is not None and probe.queries and sequence.computed >= sequence.prompt_length:
            scores = self._runner.probe_scores(probe, lease.pages, sequence.prompt_length)
            self._store.record_importance(lease, scores)

    def _publish(self, sequence: Sequence, *, final: bool = False) -> None:
        assert sequence.lease is not None
        if not self._config.deterministic:
            self._store.publish(sequence.lease, sequence.tokens, sequence.computed, final=final)
        else:  # decoding rounds otherwise than prefill: only whole chunks of the prompt are what a cold run computes
            computed = min(sequence.computed, sequence.prompt_length)
            self._store.publish(sequence.lease, sequence.tokens, computed)

    def _report(self, sequence: Sequence, reason: FinishReason) -> None:
        first, last, count = sequence.first_token, sequence.last_token, sequence.answer_length
        tpot = (last - first) / (count - 1) if first is not None and last is not None and count > 1 else None
        admitted = sequence.admitted if sequence.admitted is not None else self._clock()
        self._observer.request_finished(
            RequestReport(
                request_id=sequence.request.request_id,
                cache=sequence.cache or CacheReport(sequence.prompt_length),
                completion_tokens=count,
                finish_reason=reason,
                queue_s=admitted - sequence.submitted,
                ttft_s=None if first is None else first - sequence.submitted,
                tpot_s=tpot,
            )
        )

    def _end_all(self, error: EngineError) -> None:
        with self._wake:
            pending, self._inbox = self._inbox, []
        for sequence in pending:
            self._by_id[sequence.request.request_id] = sequence
        for sequence in list(self._by_id.values()):
            sequence.emit(error)
            self._finish(sequence, FinishReason.ABORT)


def spread_heads(count: int, heads: int, kv_heads: int) -> list[int]:
    """``count`` query heads, spread over the KV groups first (IMPRESS probes heads; groups share keys)."""
    per_kv = heads // kv_heads
    order = [kv * per_kv + i for i in range(per_kv) for kv in range(kv_heads)]
    return sorted(order[:count])
