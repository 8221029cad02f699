"""An engine that follows a script, and a real server around it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from openai import OpenAI

from gateway.api.context import AppState
from gateway.app import create_app
from gateway.config import Settings
from gateway.draining import DrainingServer
from gateway.engine.grammar import Grammar, GrammarCompiler
from gateway.engine.grammar_spec import GrammarSpec
from gateway.engine.types import (
    CacheReport,
    Delta,
    EngineError,
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestReport,
    Started,
    TokenLogprobs,
)
from gateway.observe.metrics import Metrics
from kvstore.stats import StoreStats
from kvstore.tiers.base import TierName, TierUsage

REPLY = ("Hel", "lo ", "🫠 龜", "", "!")
LIMIT_S = 10


class ScriptedEngine:
    """Answers each request with the same pieces, one token each; the script can fail or hold it.

    A prompt that was seen in the same namespace counts as cached up to its last token, half on gpu and half on disk.
    """

    def __init__(self, tokenizer: Any, metrics: Metrics) -> None:
        self.model_id = "demo"
        self.aliases: tuple[str, ...] = ("demo-alias",)
        self.created = 1_700_000_000
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self._grammars = GrammarCompiler(tokenizer, self.vocab_size, [2])
        self._metrics = metrics
        self.follow_no_script()
        self.ready = False

    def follow_no_script(self) -> None:
        """Answer plainly, and forget what came before."""
        self.ready = True
        self.max_model_len = 128
        self.reasons: list[str] = []
        self.reply: Sequence[str] = REPLY
        self.tokens: Sequence[int] = ()  # ids of the reply's pieces, when they matter
        self.refuse: EngineError | None = None
        self.fail_after: int | None = None
        self.fail_with: Exception = EngineError("the engine failed on this request; see the server's log")
        self.stop_string: str | None = None  # that ends the reply
        self.queue_seconds = 0.0  # before an answer begins
        self.hold_after: int | None = None  # pieces after which an answer waits until it is cancelled
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self._seen: set[tuple[str, tuple[int, ...]]] = set()

    cache = None  # nothing to steer

    async def start(self) -> None:
        self.ready = True

    async def close(self) -> None:
        self.ready = False

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Started | Delta, None]:
        self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        cache = self._look_up(request)
        finished = False
        try:
            await asyncio.sleep(self.queue_seconds)
            yield Started(cache)
            pieces = self.reply[: request.sampling.max_tokens]
            for i, piece in enumerate(pieces):
                await asyncio.sleep(0)
                if i == self.fail_after:
                    raise self.fail_with
                if i == self.hold_after:
                    await asyncio.Event().wait()
                last = i == len(pieces) - 1
                reason = FinishReason.STOP if len(pieces) == len(self.reply) else FinishReason.LENGTH
                finished = last
                token = self.tokens[i] if self.tokens else i
                top = request.sampling.logprobs
                logprobs = (
                    () if top is None else (TokenLogprobs(token, -0.5, tuple((7 + j, -1.0 - j) for j in range(top))),)
                )
                yield Delta(piece, (token,), reason if last else None, logprobs, self.stop_string if last else None)
            self._metrics.request_finished(
                RequestReport(request.request_id, cache, len(pieces), reason, 0.001, 0.02, 0.01)
            )
        finally:
            if not finished:
                self.cancelled.append(request.request_id)

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        return self._grammars.compile(spec)

    def _look_up(self, request: GenerationRequest) -> CacheReport:
        key = (request.namespace, tuple(request.prompt_ids))
        cached = len(request.prompt_ids) - 1 if key in self._seen else 0
        self._seen.add(key)
        return CacheReport(len(request.prompt_ids), gpu=cached // 2, disk=cached - cached // 2)

    def stats(self) -> EngineStats:
        return EngineStats(running=1, waiting=2, loading=3)

    def store_stats(self) -> StoreStats:
        return StoreStats(
            lookups=7, lookup_tokens=100, hit_tokens={TierName.GPU: 30, TierName.DISK: 20}, miss_tokens=50,
            evictions={(TierName.CPU, "capacity"): 4}, promotions={TierName.DISK: 1}, demotions={TierName.CPU: 2},
            dropped_stores={"queue_full": 3}, integrity_failures={(TierName.DISK, "checksum"): 5},
            usage={TierName.DISK: TierUsage(1000, 600, 6, read_only=True, detail="full")},
            leases=1, pages_total=10, pages_free=9, disk_read_bytes=11, disk_write_bytes=12,
            disk_read_seconds=0.5, disk_write_seconds=0.25,
        )  # fmt: skip

    def memory(self) -> dict[str, int]:
        return {"allocated": 1, "reserved": 2, "total": 3, "arena": 4}

    def degraded(self) -> list[str]:
        return self.reasons


class Running:
    """A server on a loopback port, and ways to talk to it."""

    def __init__(self, port: int, engine: ScriptedEngine, api_key: str, server: DrainingServer) -> None:
        self.port = port
        self.engine = engine
        self.server = server
        self.root = f"http://127.0.0.1:{port}"
        self.url = f"{self.root}/v1"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.Client(base_url=self.root, headers=headers, timeout=LIMIT_S)
        self.client = OpenAI(base_url=self.url, api_key=api_key or "none", max_retries=0, timeout=LIMIT_S)

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def metric(self, line: str) -> float:
        """Value of the sample with exactly this name and labels; 0 when there is none."""
        for found in self.http.get("/metrics").text.splitlines():
            name, _, value = found.rpartition(" ")
            if name == line:
                return float(value)
        return 0.0


@contextmanager
def serving(tokenizer: Any, **sections: dict[str, Any]) -> Iterator[Running]:
    """A real uvicorn server on the scripted engine, with these settings."""
    settings = Settings(**sections)
    metrics = Metrics(settings)
    engine = ScriptedEngine(tokenizer, metrics)
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(settings, engine, metrics)
    server = DrainingServer(uvicorn.Config(app, log_config=None, access_log=False), AppState.of_app(app).drain)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    running = Running(listener.getsockname()[1], engine, settings.server.api_key, server)
    try:
        yield running
    finally:
        running.http.close()
        running.client.close()
        server.should_exit = True
        thread.join(LIMIT_S)


def wait_for(condition: Any) -> None:
    """Until it holds; a failure after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def data_lines(response: httpx.Response) -> list[str]:
    """What follows ``data: ``, of each line that has it; any other line but a blank one or a comment fails."""
    lines = response.content.decode("utf-8").split("\n")
    assert all(line == "" or line.startswith(("data: ", ":")) for line in lines), lines
    return [line[6:] for line in lines if line.startswith("data: ")]
