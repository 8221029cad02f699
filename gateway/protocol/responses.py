"""Answer bodies of the local model, streamed and whole. Dictionaries, ready for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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

    def piece(self, index: int, text: str) -> dict[str, Any]: ...

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]: ...

    def usage(self, usage: Usage) -> dict[str, Any]: ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]: ...


class ChatFormat:
    """``chat.completion`` and its chunks."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return self._chunk(index, {"content": text}, None)

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]:
        return self._chunk(index, {}, finish_reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        return {**_head(self._head, "chat.completion.chunk"), "choices": [], "usage": usage.body()}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        listed = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**_head(self._head, "chat.completion"), "choices": listed, "usage": usage.body()}

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _chunk(self._head, "chat.completion.chunk", choice)


class CompletionFormat:
    """``text_completion``. ``echoed`` is the prompt's text by choice, put in front of its answer."""

    def __init__(self, head: AnswerHead, echoed: Sequence[str] = ()) -> None:
        self._head = head
        self._echoed = echoed

    def opening(self, index: int) -> dict[str, Any] | None:
        return self.piece(index, self._echoed[index]) if self._echoed else None

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return _chunk(self._head, "text_completion", _completion_choice(index, text, None))

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]:
        return _chunk(self._head, "text_completion", _completion_choice(index, "", finish_reason))

    def usage(self, usage: Usage) -> dict[str, Any]:
        return {**_head(self._head, "text_completion"), "choices": [], "usage": usage.body()}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        echoed = self._echoed or [""] * len(choices)
        listed = [
            _completion_choice(index, echoed[index] + choice.text, choice.finish_reason)
            for index, choice in enumerate(choices)
        ]
        return {**_head(self._head, "text_completion"), "choices": listed, "usage": usage.body()}


def _completion_choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _head(head: AnswerHead, kind: str) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def _chunk(head: AnswerHead, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    chunk = {**_head(head, kind), "choices": [choice]}
    # The OpenAI API sends a null usage in every chunk before the one that has it.
    return {**chunk, "usage": None} if head.usage_in_stream else chunk
