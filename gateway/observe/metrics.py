"""Metrics of the server: what is counted as it happens, and the registry that ``/metrics`` shows."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from gateway.config import Settings
from gateway.engine.protocol import EngineProtocol
from gateway.engine.types import RequestReport
from gateway.observe.collector import EngineCollector
from gateway.observe.logs import RequestLog

#: Seconds; a warm first token takes tens of milliseconds, a cold long prompt a minute.
_LATENCY = (0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.35, 0.5, 1, 2, 3.5, 5, 10, 20, 35, 60, 120)
_TOKEN_GAP = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class TokenTally(Protocol):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Metrics:
    """Counts requests, and observes the engine (see EngineObserver). Thread-safe.

    Labels come from closed sets: routes as declared, statuses, tiers, reasons; never a path, model or key of a client.

    Args:
        settings: says whether finished requests are logged.
    """

    def __init__(self, settings: Settings) -> None:
        self.requests = RequestLog(settings.logging.log_prefix_hit)
        self._registry = registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        self._finished = Counter("kvgate_requests", "Finished sequences", ["finish_reason"], registry=registry)
        self._prompt_tokens = Counter("kvgate_prompt_tokens", "Prompt tokens, cached or not", registry=registry)
        self._generated_tokens = Counter("kvgate_generated_tokens", "Tokens generated", registry=registry)
        self._ttft = _seconds("ttft", "From submission to the first token", _LATENCY, registry)
        self._tpot = _seconds("tpot", "Mean gap between the tokens of a sequence", _TOKEN_GAP, registry)
        self._queue = _seconds("queue", "From submission to admission", _LATENCY, registry)
        self._e2e = _seconds("e2e", "From submission to the last token", _LATENCY, registry)
        self._step = _seconds("engine_step", "One step of the engine", _LATENCY, registry)
        self._step_tokens = Counter("kvgate_engine_tokens", "Tokens computed in steps", ["phase"], registry=registry)
        self._http = Counter(
            "kvgate_http_requests", "HTTP requests answered", ["route", "method", "status"], registry=registry
        )
        self._upstream = Counter(
            "kvgate_upstream_requests", "Requests forwarded", ["status", "outcome"], registry=registry
        )
        self._upstream_tokens = Counter(
            "kvgate_upstream_tokens", "Tokens of forwarded requests", ["kind"], registry=registry
        )

    def watch(self, engine: EngineProtocol) -> None:
        """Show the engine's and the store's own numbers as well."""
        self._registry.register(EngineCollector(engine))

    def render(self) -> tuple[bytes, str]:
        """Body and content type of ``/metrics``."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def request_finished(self, report: RequestReport) -> None:
        self._finished.labels(report.finish_reason.value).inc()
        self._prompt_tokens.inc(report.cache.prompt_tokens)
        self._generated_tokens.inc(report.completion_tokens)
        self._queue.observe(report.queue_s)
        if report.ttft_s is not None:
            self._ttft.observe(report.ttft_s)
            self._e2e.observe(report.ttft_s + (report.tpot_s or 0.0) * max(0, report.completion_tokens - 1))
        if report.tpot_s is not None:
            self._tpot.observe(report.tpot_s)
        self.requests.finished(report)

    def step_finished(self, seconds: float, prefill_tokens: int, decode_tokens: int) -> None:
        self._step.observe(seconds)
        self._step_tokens.labels("prefill").inc(prefill_tokens)
        self._step_tokens.labels("decode").inc(decode_tokens)

    def http_answered(self, route: str, method: str, status: int) -> None:
        """One HTTP request; status 0 = the client left before an answer."""
        self._http.labels(route, method if method in _METHODS else "other", str(status)).inc()

    def upstream_answered(self, status: int, outcome: str, tokens: TokenTally) -> None:
        """One forwarded request; ``outcome`` is ``ok``, ``failed`` or ``cancelled``."""
        self._upstream.labels(str(status), outcome).inc()
        for kind, count in (
            ("prompt", tokens.prompt_tokens),
            ("completion", tokens.completion_tokens),
            ("cached", tokens.cached_tokens),
        ):
            self._upstream_tokens.labels(kind).inc(count)


def _seconds(name: str, text: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"kvgate_{name}_seconds", text, buckets=buckets, registry=registry)
