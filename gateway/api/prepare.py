"""Bodies to prompts: what a request wants, understood and encoded. Runs on a thread, off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.answer.reader import AnswerReader
from gateway.api.context import AppState
from gateway.api.errors import ApiError
from gateway.engine.grammar import Grammar, GrammarError
from gateway.protocol.errors import InvalidRequest
from gateway.protocol.limits import check_limits
from gateway.protocol.logprobs import BytesOf
from gateway.protocol.requests import ChatRequest, CompletionRequest, SamplingFields
from gateway.protocol.responses import AnswerFormat, AnswerHead, ChatFormat, CompletionFormat
from gateway.protocol.structured import Structure


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is understood: its prompts as token ids, and how its answer is written."""

    asked: SamplingFields
    prompts: list[list[int]]
    id_prefix: str
    form: Callable[[AnswerHead], AnswerFormat]
    prompt_param: str
    reader: Callable[[], AnswerReader] = AnswerReader
    grammar: Grammar | None = None
    shown_tokens: frozenset[int] = frozenset()


def prepare_chat(state: AppState, body: Mapping[str, Any]) -> Prepared:
    """Raises InvalidRequest, PromptError."""
    check_limits(body, state.settings.limits)
    asked = ChatRequest.parse(body)
    bytes_of = _bytes_of(state, asked)
    dialect, use = state.dialect, asked.tool_use
    prompt = state.encoder.encode_chat(asked)
    opened = dialect.thinks and state.encoder.ends_in_thought(asked, prompt)

    def reader() -> AnswerReader:
        return AnswerReader(
            bytes_of=bytes_of,
            thoughts=dialect.splitter(opened=opened),
            tools=dialect.parser(use),
            call_id=dialect.call_id,
            parallel=use.parallel or bool(use.forced),
        )

    param = "tools" if use.forced or asked.structure is None else asked.structure.param
    spec = dialect.grammar(use, asked.structure.spec if asked.structure else None, opened=opened)
    return Prepared(
        asked,
        [prompt],
        "chatcmpl-",
        lambda head: ChatFormat(head, bytes_of),
        "messages",
        reader,
        _grammar(state, Structure(param, spec) if spec else None),
        dialect.shown_tokens(use),
    )


def prepare_completion(state: AppState, body: Mapping[str, Any]) -> Prepared:
    """Raises InvalidRequest, PromptError."""
    check_limits(body, state.settings.limits)
    asked = CompletionRequest.parse(body)
    prompts = [_prompt_ids(state, prompt) for prompt in asked.prompt]
    echoed = [
        prompt if isinstance(prompt, str) else state.encoder.decode(prompt)
        for prompt in asked.prompt
        for _ in range(asked.choices)
        if asked.echo
    ]
    bytes_of = _bytes_of(state, asked)
    return Prepared(
        asked,
        prompts,
        "cmpl-",
        lambda head: CompletionFormat(head, echoed, bytes_of, top_logprobs=bool(asked.logprobs)),
        "prompt",
        lambda: AnswerReader(bytes_of=bytes_of),
        _grammar(state, asked.structure),
    )


def _grammar(state: AppState, structure: Structure | None) -> Grammar | None:
    """The compiled grammar of what the client asked for.

    Raises:
        InvalidRequest: it is malformed, too large or too complex.
    """
    if structure is None:
        return None
    try:
        return state.engine.compile_grammar(structure.spec)
    except GrammarError as error:
        raise InvalidRequest(f"{structure.param}: {error}", structure.param, error.code) from None


def _bytes_of(state: AppState, asked: SamplingFields) -> BytesOf | None:
    """What log-probabilities are written with, where the client asked for them."""
    return None if asked.logprob_count is None else state.encoder.token_bytes.of


def _prompt_ids(state: AppState, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return state.encoder.encode_completion(prompt)
    check_vocabulary(state, prompt, "prompt")
    return prompt


def check_vocabulary(state: AppState, ids: list[int], param: str) -> None:
    """Raises ApiError (400) for a token id that the model doesn't have."""
    size = state.engine.vocab_size
    if wrong := [token for token in ids if not 0 <= token < size]:
        raise ApiError(400, f"{param}: token {wrong[0]} is not in the vocabulary (0..{size - 1})", param=param)
