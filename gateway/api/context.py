"""What the endpoints share; made once by ``create_app``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from anyio import CapacityLimiter
from fastapi import FastAPI, Request

from gateway.answer.dialect import Dialect
from gateway.api.drain import Drain
from gateway.api.kept import KeptResponses
from gateway.auth.keys import KeyCheck
from gateway.auth.namespace import Namespaces
from gateway.config import Settings
from gateway.engine.protocol import EngineProtocol
from gateway.observe.metrics import Metrics
from gateway.prompt.encode import PromptEncoder
from gateway.upstream.client import Upstream

#: Prompts that are parsed, rendered and encoded at the same time; more would only share the same cores.
_PROMPT_THREADS = 4


@dataclass(frozen=True, slots=True)
class AppState:
    settings: Settings
    engine: EngineProtocol
    encoder: PromptEncoder
    dialect: Dialect
    metrics: Metrics
    keys: KeyCheck
    namespaces: Namespaces
    upstream: Upstream | None
    drain: Drain
    kept: KeptResponses
    prompt_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_PROMPT_THREADS))

    @classmethod
    def of(cls, request: Request) -> AppState:
        return cls.of_app(request.app)

    @classmethod
    def of_app(cls, app: FastAPI) -> AppState:
        return cast(AppState, app.state.shared)

    def is_local(self, model: str) -> bool:
        return model == self.engine.model_id or model in self.engine.aliases
