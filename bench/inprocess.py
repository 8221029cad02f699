"""An engine in the bench's own process, without HTTP: requests by token ids, times at the engine's face."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import dtype_name
from gateway.config import Settings
from gateway.engine.build import build_engine
from gateway.engine.engine import Engine
from gateway.engine.types import Delta, GenerationRequest, RequestReport, SamplingParams, Started

_names = itertools.count()


class Quiet:
    def request_finished(self, report: RequestReport) -> None: ...

    def step_finished(self, seconds: float, prefill_tokens: int, decode_tokens: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """``stamps``: seconds from the request to each token."""

    tokens: list[int]
    stamps: list[float]
    cached: int
    tiers: dict[str, int]
    began: float

    @property
    def ttft_s(self) -> float:
        return self.stamps[0]

    @property
    def tpot_s(self) -> float:
        return (self.stamps[-1] - self.stamps[0]) / max(1, len(self.stamps) - 1)


def make_engine(folder: Path, *, model: dict[str, Any] | None = None, cache: dict[str, Any], **engine: Any) -> Engine:
    settings = Settings(
        model={"name": "demo", "dtype": dtype_name(), **(model or {})},
        prefix_cache={"disk_cache_dir": str(folder), **cache},
        engine=engine,
    )
    return build_engine(settings, Quiet())


def chat(one: Engine, system: str, question: str, answer: str = "") -> list[int]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    start = one.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(one.tokenizer(start + answer, add_special_tokens=False)["input_ids"])


async def ask(one: Engine, ids: list[int], tokens: int, namespace: str = "", **sampling: Any) -> Answer:
    """One request that makes exactly ``tokens`` tokens; greedy unless said."""
    settings = SamplingParams(max_tokens=tokens, **{"ignore_eos": True, "temperature": 0.0, **sampling})
    began = time.perf_counter()
    found, stamps, cache = [], [], None
    async with aclosing(one.generate(GenerationRequest(f"b{next(_names)}", ids, settings, namespace))) as events:
        async for event in events:
            if isinstance(event, Delta):
                found.extend(event.token_ids)
                stamps.extend([time.perf_counter() - began] * len(event.token_ids))
            elif isinstance(event, Started):
                cache = event.cache
    assert cache is not None
    tiers = {"gpu": cache.gpu, "cpu": cache.cpu, "disk": cache.disk}
    return Answer(found, stamps, cache.cached_tokens, tiers, began)


async def rate(one: Engine, asked: list[tuple[list[int], dict[str, Any]]], tokens: int) -> float:
    """Tokens a second of concurrent requests, from the first token of any to the last of all."""
    answers = await asyncio.gather(*(ask(one, ids, tokens, **sampling) for ids, sampling in asked))
    first = min(answer.began + answer.stamps[0] for answer in answers)
    last = max(answer.began + answer.stamps[-1] for answer in answers)
    return (sum(len(answer.tokens) for answer in answers) - 1) / (last - first)
