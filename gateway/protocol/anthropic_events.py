"""Answers in the shape of Anthropic's Messages API, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.protocol.responses import Usage

Event = dict[str, Any]

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens as Anthropic counts them: three kinds of prompt tokens that add up.

    Args:
        usage: of the chat completion.
        marked: prompt tokens up to the last ``cache_control``. What of these was not cached is now ("creation").
    """

    usage: Usage
    marked: int = 0

    def body(self) -> dict[str, Any]:
        read = self.usage.cached_tokens
        written = max(0, min(self.marked, self.usage.prompt_tokens) - read)
        return {
            "input_tokens": self.usage.prompt_tokens - read - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": read,
            "output_tokens": self.usage.completion_tokens,
        }


def stop_of(finish_reason: str, stop_string: str | None) -> dict[str, Any]:
    """``stop_reason`` and ``stop_sequence``."""
    if finish_reason == "stop" and stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    return {"stop_reason": _STOP_REASONS.get(finish_reason, "end_turn"), "stop_sequence": None}


def head(message_id: str, model: str, usage: Mapping[str, Any]) -> dict[str, Any]:
    """A message without content."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def content_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The blocks of a chat completion's message; an empty text when there is nothing."""
    blocks: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        blocks.append({"type": "text", "text": message.get("content") or ""})
    for call in calls:
        function = call["function"]
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _object(function["arguments"])}
        )
    return blocks


class BlockEvents:
    """Turns the deltas of a chat stream into events of content blocks, one block open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open: object = None  # kind of the block that is open; calls are told apart by their index

    def delta(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        if reasoning := delta.get("reasoning_content"):
            yield from self._turn_to("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._piece({"type": "thinking_delta", "thinking": reasoning})
        if text := delta.get("content"):
            yield from self._turn_to("text", {"type": "text", "text": ""})
            yield self._piece({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            start = {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": {}}
            yield from self._turn_to(call["index"], start)
            if function.get("arguments"):
                yield self._piece({"type": "input_json_delta", "partial_json": function["arguments"]})

    def end(self) -> Iterator[Event]:
        if self._index < 0:
            yield from self._turn_to("text", {"type": "text", "text": ""})
        yield from self._close()

    def _turn_to(self, kind: object, block: dict[str, Any]) -> Iterator[Event]:
        if self._open == kind:
            return
        yield from self._close()
        self._index += 1
        self._open = kind
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}

    def _piece(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _object(arguments: str) -> Any:
    """The arguments of a call; a call that ``max_tokens`` cut is no JSON and has none."""
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
