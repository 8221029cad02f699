"""Answer bodies of the local model, streamed and whole. Dictionaries, ready for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.answer.pieces import CallPiece, Piece, ToolCall, whole_calls
from gateway.engine.types import TokenLogprobs
from gateway.protocol.logprobs import BytesOf, CompletionLogprobs, chat_logprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; a prompt with several answers counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Choice:
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, pieces: Sequence[Piece], finish_reason: str) -> Choice:
        """Join the pieces of one answer."""
        return cls(
            text="".join(piece.content for piece in pieces),
            finish_reason=finish_reason,
            logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
            reasoning="".join(piece.reasoning for piece in pieces),
            calls=whole_calls(call for piece in pieces for call in piece.calls),
        )


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that all pieces of an answer share."""

    id: str
    created: int  # Unix time
    model: str
    usage_in_stream: bool = False


class AnswerFormat(Protocol):
    """How one endpoint writes an answer."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice; None when the endpoint has none."""
        ...

    def piece(self, index: int, piece: Piece) -> dict[str, Any]: ...

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]: ...

    def usage(self, usage: Usage) -> dict[str, Any]: ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]: ...


class ChatFormat:
    """``chat.completion`` and its chunks.

    Args:
        head: the fields all pieces share.
        bytes_of: bytes of a token id, where log-probabilities were asked for.
    """

    def __init__(self, head: AnswerHead, bytes_of: BytesOf | None = None) -> None:
        self._head = head
        self._bytes_of = bytes_of

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._chunk(index, _delta(piece), None, self._logprobs(piece.logprobs))

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]:
        return self._chunk(index, {}, finish_reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        return {**_head(self._head, "chat.completion.chunk"), "choices": [], "usage": usage.body()}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        listed = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**_head(self._head, "chat.completion"), "choices": listed, "usage": usage.body()}

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return None if self._bytes_of is None else chat_logprobs(entries, self._bytes_of)

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return _chunk(self._head, "chat.completion.chunk", choice)


def _delta(piece: Piece) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if piece.reasoning:
        delta["reasoning_content"] = piece.reasoning
    if piece.calls:
        delta["tool_calls"] = [_call_delta(call) for call in piece.calls]
    return {"content": piece.content, **delta} if piece.content or not delta else delta


def _call_delta(call: CallPiece) -> dict[str, Any]:
    """The first piece of a call says what it is; the others are index and arguments only."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _message(choice: Choice) -> dict[str, Any]:
    content = choice.text if choice.text or not choice.calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return message


class CompletionFormat:
    """``text_completion``.

    Args:
        head: the fields all pieces share.
        echoed: the prompt's text by choice, put in front of its answer; empty when not asked for.
        bytes_of: bytes of a token id, where log-probabilities were asked for.
        top_logprobs: whether alternatives were asked for too.
    """

    def __init__(
        self,
        head: AnswerHead,
        echoed: Sequence[str] = (),
        bytes_of: BytesOf | None = None,
        top_logprobs: bool = False,
    ) -> None:
        self._head = head
        self._echoed = echoed
        self._bytes_of = bytes_of
        self._top_logprobs = top_logprobs
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._chunk(index, self._echoed[index], None) if self._echoed else None

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._chunk(index, piece.content, None, piece.logprobs)

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]:
        return self._chunk(index, "", finish_reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        return {**_head(self._head, "text_completion"), "choices": [], "usage": usage.body()}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        echoed = self._echoed or [""] * len(choices)
        listed = [
            self._choice(index, echoed[index] + choice.text, choice.finish_reason, choice.logprobs)
            for index, choice in enumerate(choices)
        ]
        return {**_head(self._head, "text_completion"), "choices": listed, "usage": usage.body()}

    def _chunk(
        self, index: int, text: str, finish_reason: str | None, entries: Sequence[TokenLogprobs] = ()
    ) -> dict[str, Any]:
        return _chunk(self._head, "text_completion", self._choice(index, text, finish_reason, entries))

    def _choice(
        self, index: int, text: str, finish_reason: str | None, entries: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        logprobs = None
        if self._bytes_of is not None:
            if index not in self._logprobs:
                echoed = len(self._echoed[index]) if self._echoed else 0
                self._logprobs[index] = CompletionLogprobs(self._bytes_of, echoed)
            logprobs = self._logprobs[index].piece(entries, top=self._top_logprobs)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _head(head: AnswerHead, kind: str) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def _chunk(head: AnswerHead, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    chunk = {**_head(head, kind), "choices": [choice]}
    # The OpenAI API sends a null usage in every chunk before the one that has it.
    return {**chunk, "usage": None} if head.usage_in_stream else chunk
