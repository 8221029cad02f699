"""``/v1/responses``: OpenAI's Responses API over the same engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from gateway.api.access import require_key
from gateway.api.context import AppState
from gateway.api.errors import ApiError
from gateway.api.generation import Generation
from gateway.api.kept import Kept
from gateway.api.prepare import Prepared, prepare_chat
from gateway.api.serving import Door, complete
from gateway.api.sse import PING, event
from gateway.protocol.errors import InvalidRequest
from gateway.protocol.limits import check_limits
from gateway.protocol.response_body import OutputItems, response_body
from gateway.protocol.response_items import chat_messages
from gateway.protocol.response_request import ResponsesRequest, chat_body
from gateway.protocol.responses import AnswerHead

router = APIRouter(prefix="/v1/responses", dependencies=[Depends(require_key)])


@router.post("")
async def create(request: Request) -> Response:
    """A response, whole or streamed."""
    call = _Call(AppState.of(request), _namespace(request))
    return await complete(request, Door("/responses", call.prepare, call.writer, ends_with_done=False))


@router.get("/{response_id}")
async def retrieve(request: Request, response_id: str) -> dict[str, Any]:
    """A kept response."""
    return _find(request, response_id).body


@router.get("/{response_id}/input_items")
async def input_items(request: Request, response_id: str) -> dict[str, Any]:
    """The input of a kept response, without that of earlier ones."""
    items = _find(request, response_id).input
    return {"object": "list", "data": items, "has_more": False, "first_id": None, "last_id": None}


@router.delete("/{response_id}")
async def delete(request: Request, response_id: str) -> dict[str, Any]:
    """Forget a kept response. Later ones that went on from it stay."""
    if not AppState.of(request).kept.delete(_namespace(request), response_id):
        raise _not_kept(404, response_id, "response_id")
    return {"id": response_id, "object": "response", "deleted": True}


def _namespace(request: Request) -> str:
    return AppState.of(request).namespaces.of(request.state.credential, None)


def _find(request: Request, response_id: str) -> Kept:
    found = AppState.of(request).kept.get(_namespace(request), response_id)
    if found is None:
        raise _not_kept(404, response_id, "response_id")
    return found


def _not_kept(status: int, response_id: str, param: str, code: str = "not_found") -> ApiError:
    return ApiError(
        status,
        f"the response {response_id[:80]!r} is not kept here (any more: see [limits].response_seconds and "
        "max_responses); send the whole conversation as input",
        code=code,
        param=param,
    )


class _Call:
    """One request to ``/v1/responses``: what its preparation finds out is needed to keep the answer."""

    def __init__(self, state: AppState, namespace: str) -> None:
        self._state = state
        self._namespace = namespace
        self._body: Mapping[str, Any] = {}
        self._history: list[dict[str, Any]] = []

    def prepare(self, state: AppState, body: Mapping[str, Any]) -> Prepared:
        check_limits(body, state.settings.limits)
        asked = ResponsesRequest.parse(body)
        if asked.previous_response_id:
            self._history = self._messages_of(asked.previous_response_id)
        self._body = body
        try:
            prepared = prepare_chat(state, chat_body(asked, body, self._history))
        except InvalidRequest as error:
            raise error.renamed("response_format", "text.format") from None
        self._history = [*self._history, *chat_messages(asked.input or "")]
        return replace(prepared, id_prefix="resp_", prompt_param="input")

    def _messages_of(self, response_id: str) -> list[dict[str, Any]]:
        kept = self._state.kept.get(self._namespace, response_id)
        if kept is None:
            raise _not_kept(400, response_id, "previous_response_id", "previous_response_not_found")
        return kept.messages

    def writer(self, head: AnswerHead, generation: Generation) -> ResponsesWriter:
        return ResponsesWriter(head, generation, self._body, self.keep)

    def keep(self, made: dict[str, Any]) -> None:
        """Remember a finished response, unless the client forbids it."""
        if self._body.get("store") is False:
            return
        given = self._body["input"]
        items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
        messages = [*self._history, *chat_messages(made["output"])]
        self._state.kept.put(self._namespace, Kept(made, items, messages))


class ResponsesWriter:
    """A generation's answer as a response object or as its events.

    Args:
        head: id, time and model.
        generation: tells usage.
        body: of the request; parts of it are repeated.
        keep: called with the finished response, before its last event.
    """

    ping = PING

    def __init__(self, head: AnswerHead, generation: Generation, body: Mapping[str, Any], keep: Any) -> None:
        self._head = head
        self._generation = generation
        self._body = body
        self._keep = keep
        self._items = OutputItems()

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        choice = answer["choices"][0]
        message = dict(choice["message"])
        calls = message.get("tool_calls") or []
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        for _ in self._items.delta(message, choice["logprobs"]):
            pass
        for _ in self._items.end(choice["finish_reason"]):
            pass
        return self._finished(choice["finish_reason"])

    async def events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[bytes, None]:
        sequence, begun = 0, False
        try:
            async for made in self._events(chunks):
                begun = True
                yield event({**made, "sequence_number": sequence}, made["type"])
                sequence += 1
        except Exception as error:
            made = self._failure(ApiError.of(error), begun)
            yield event({**made, "sequence_number": sequence}, made["type"])

    async def _events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[dict[str, Any], None]:
        begun, finish_reason = False, "stop"
        async for chunk in chunks:
            if not begun:
                begun = True
                for kind in ("created", "in_progress"):
                    yield {"type": f"response.{kind}", "response": self._state("in_progress")}
            for choice in chunk["choices"]:
                for made in self._items.delta(choice["delta"], choice["logprobs"]):
                    yield made
                finish_reason = choice["finish_reason"] or finish_reason
        for made in self._items.end(finish_reason):
            yield made
        finished = self._finished(finish_reason)
        yield {"type": f"response.{finished['status']}", "response": finished}

    def _finished(self, finish_reason: str) -> dict[str, Any]:
        status = "incomplete" if finish_reason == "length" else "completed"
        made = response_body(self._head, self._body, status, self._items.items, self._generation.usage)
        self._keep(made)
        return made

    def _state(self, status: str, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return response_body(self._head, self._body, status, self._items.items, error=error)

    def _failure(self, error: ApiError, begun: bool) -> dict[str, Any]:
        told = {"code": error.code or "server_error", "message": error.message}
        if not begun:
            return {"type": "error", "param": error.param, **told}
        return {"type": "response.failed", "response": self._state("failed", told)}
