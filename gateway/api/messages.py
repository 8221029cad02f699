"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API over the same engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from gateway.api.access import require_key
from gateway.api.context import AppState
from gateway.api.errors import ApiError, anthropic_error
from gateway.api.generation import Generation
from gateway.api.prepare import Prepared, prepare_chat
from gateway.api.serving import Door, complete, in_prompt_thread, read_request
from gateway.api.sse import event
from gateway.api.tokens import require_local
from gateway.prompt.template import PromptError
from gateway.protocol.anthropic import chat_body, up_to_breakpoint
from gateway.protocol.anthropic_events import BlockEvents, Counts, content_of, head, stop_of
from gateway.protocol.errors import InvalidRequest
from gateway.protocol.limits import check_limits
from gateway.protocol.requests import ChatRequest
from gateway.protocol.responses import AnswerHead

router = APIRouter(prefix="/v1/messages", dependencies=[Depends(require_key)])


@router.post("")
async def messages(request: Request) -> Response:
    """A message, whole or streamed."""
    call = _Call()
    return await complete(request, Door("/messages", call.prepare, call.writer, ends_with_done=False))


@router.post("/count_tokens")
async def count_tokens(request: Request) -> dict[str, Any]:
    """Tokens of the prompt that the same body would have."""
    state = AppState.of(request)
    body = await read_request(request)
    require_local(state, body.get("model"))
    check_limits(body, state.settings.limits)
    ids = await in_prompt_thread(
        state, lambda: state.encoder.encode_chat(ChatRequest.parse(chat_body(body, counting=True)))
    )
    return {"input_tokens": len(ids)}


class _Call:
    """One request to ``/v1/messages``: what its preparation finds out is written in its answer."""

    def __init__(self) -> None:
        self._marked = 0

    def prepare(self, state: AppState, body: Mapping[str, Any]) -> Prepared:
        check_limits(body, state.settings.limits)
        try:
            prepared = prepare_chat(state, chat_body(body))
        except InvalidRequest as error:
            raise error.renamed("response_format", "output_config.format") from None
        self._marked = _marked_tokens(state, body, prepared.prompts[0])
        return replace(prepared, id_prefix="msg_")

    def writer(self, answer_head: AnswerHead, generation: Generation) -> AnthropicWriter:
        return AnthropicWriter(answer_head, generation, self._marked)


class AnthropicWriter:
    """A generation's answer as a Message or as its events.

    Args:
        answer_head: id and model.
        generation: tells usage and the stop sequence.
        marked: see Counts.
    """

    ping = event({"type": "ping"}, "ping")

    def __init__(self, answer_head: AnswerHead, generation: Generation, marked: int) -> None:
        self._head = answer_head
        self._generation = generation
        self._marked = marked

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        choice = answer["choices"][0]
        made = head(self._head.id, self._head.model, self._counts())
        return {**made, "content": content_of(choice["message"]), **self._stop(choice["finish_reason"])}

    async def events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[bytes, None]:
        try:
            async for made in self._events(chunks):
                yield event(made, made["type"])
        except Exception as error:
            yield event(anthropic_error(ApiError.of(error)), "error")

    async def _events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[dict[str, Any], None]:
        blocks = BlockEvents()
        begun, finish_reason = False, "stop"
        async for chunk in chunks:
            if not begun:
                begun = True
                yield {"type": "message_start", "message": head(self._head.id, self._head.model, self._counts())}
                yield {"type": "ping"}
            for choice in chunk["choices"]:
                for made in blocks.delta(choice["delta"]):
                    yield made
                finish_reason = choice["finish_reason"] or finish_reason
        for made in blocks.end():
            yield made
        yield {"type": "message_delta", "delta": self._stop(finish_reason), "usage": self._counts()}
        yield {"type": "message_stop"}

    def _counts(self) -> dict[str, Any]:
        return Counts(self._generation.usage, self._marked).body()

    def _stop(self, finish_reason: str) -> dict[str, Any]:
        return stop_of(finish_reason, self._generation.stop_strings.get(0))


def _marked_tokens(state: AppState, body: Mapping[str, Any], prompt: list[int]) -> int:
    """Tokens of the prompt up to its last ``cache_control``: as far as it agrees with the prompt that ends there."""
    try:
        marked = up_to_breakpoint(body)
        if marked is None:
            return 0
        ids = state.encoder.encode_chat(ChatRequest.parse(marked))
    except (InvalidRequest, PromptError):  # some templates refuse a prompt that ends there
        return 0
    return next((i for i, (a, b) in enumerate(zip(ids, prompt, strict=False)) if a != b), min(len(ids), len(prompt)))
