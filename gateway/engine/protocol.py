"""What the HTTP layer needs of an engine, so that it can be tested with a scripted one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from gateway.engine.grammar import Grammar
from gateway.engine.grammar_spec import GrammarSpec
from gateway.engine.types import Delta, EngineStats, GenerationRequest, Started
from kvstore.stats import StoreStats
from kvstore.store import PrefixStore


class EngineProtocol(Protocol):
    """A local model that answers requests.

    ``tokenizer`` is a fast tokenizer of transformers (it owns the chat template); ``created`` is a Unix time.
    """

    model_id: str
    aliases: tuple[str, ...]
    max_model_len: int
    created: int
    tokenizer: Any
    vocab_size: int

    @property
    def ready(self) -> bool: ...

    @property
    def cache(self) -> PrefixStore | None:
        """The prefix cache, for those who look into it or steer it; None when it is off."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Started | Delta, None]:
        """Started first, then Deltas, the last with a finish_reason. Closing it ends the work within a step.

        Raises:
            EngineError: before Started when the request can't run, later when a step failed.
        """
        ...

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        """Make a grammar ready for ``GenerationRequest.grammar``. Blocks for up to seconds; from any thread.

        Raises:
            GrammarError: malformed, too large or too complex.
        """
        ...

    def stats(self) -> EngineStats: ...

    def store_stats(self) -> StoreStats | None: ...

    def memory(self) -> dict[str, int]:
        """Bytes of device memory by kind: ``allocated``, ``reserved``, ``total``, ``arena``."""
        ...

    def degraded(self) -> list[str]:
        """Why service is reduced, one sentence each; empty when all is well."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...
