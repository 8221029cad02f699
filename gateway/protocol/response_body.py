"""Response objects of the Responses API, and the events in which their output grows."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.protocol.responses import AnswerHead, Usage

Event = dict[str, Any]

#: Request fields that a response repeats, and what they are when the request leaves them out.
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


def response_body(
    head: AnswerHead,
    body: Mapping[str, Any],
    status: str,
    output: list[dict[str, Any]],
    usage: Usage | None = None,
    error: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A response object.

    Args:
        head: id, time and model.
        body: of the request.
        status: ``in_progress``, ``completed``, ``incomplete`` or ``failed``.
        output: its items.
        usage: None before the end.
        error: ``code`` and ``message`` of a failed one.
    """
    echoed = {key: body[key] if body.get(key) is not None else unset for key, unset in _ECHOED.items()}
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": head.model,
        "output": output,
        "background": False,
        "service_tier": "default",
        "usage": None if usage is None else _usage(usage),
        **echoed,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class OutputItems:
    """Grows output items from the deltas of a chat answer, and tells each step as an event.

    One item is open at a time: a thought, then text, then calls.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: object = None  # kind of the open item; calls are told apart by their index

    def delta(self, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None = None) -> Iterator[Event]:
        if reasoning := delta.get("reasoning_content"):
            yield from self._turn_to("reasoning", {"type": "reasoning", "id": _new("rs"), "summary": [], "content": []})
            yield from self._grow_part(reasoning, {"type": "reasoning_text", "text": ""}, "response.reasoning_text")
        entries = (logprobs or {}).get("content") or []
        if (text := delta.get("content")) or entries:
            yield from self._say(text or "", entries)
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    def end(self, finish_reason: str) -> Iterator[Event]:
        """The answer is over; it has at least an empty text."""
        if not self.items:
            yield from self._say("", [])
        yield from self._close("incomplete" if finish_reason == "length" else "completed")

    @property
    def _item(self) -> dict[str, Any]:
        return self.items[-1]

    @property
    def _part(self) -> dict[str, Any]:
        return self._item["content"][0]  # type: ignore[no-any-return]

    def _turn_to(self, kind: object, item: dict[str, Any]) -> Iterator[Event]:
        if self._open == kind:
            return
        yield from self._close("completed")
        self._open = kind
        self.items.append({**item, "status": "in_progress"})
        yield self._event("response.output_item.added", item=dict(self._item))

    def _say(self, text: str, entries: list[Any]) -> Iterator[Event]:
        yield from self._turn_to("message", {"type": "message", "id": _new("msg"), "role": "assistant", "content": []})
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._grow_part(text, part, "response.output_text", entries)

    def _grow_part(
        self, text: str, empty: dict[str, Any], name: str, entries: list[Any] | None = None
    ) -> Iterator[Event]:
        if not self._item["content"]:
            self._item["content"].append(empty)
            yield self._event("response.content_part.added", part=dict(empty), **self._place())
        self._part["text"] += text
        extra = {}
        if name == "response.output_text":
            self._part["logprobs"] += entries or []
            extra = {"logprobs": entries or []}
        if text or entries:
            yield self._event(f"{name}.delta", delta=text, **self._place(), **extra)

    def _call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        function = call["function"]
        item = {
            "type": "function_call",
            "id": _new("fc"),
            "call_id": call.get("id"),
            "name": function.get("name"),
            "arguments": "",
        }
        yield from self._turn_to(call["index"], item)
        if piece := function.get("arguments"):
            self._item["arguments"] += piece
            yield self._event("response.function_call_arguments.delta", item_id=self._item["id"], delta=piece)

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        self._open = None
        item = self._item
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event(
                "response.function_call_arguments.done",
                item_id=item["id"],
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            is_text = item["type"] == "message"
            name = "response.output_text.done" if is_text else "response.reasoning_text.done"
            extra = {"logprobs": self._part["logprobs"]} if is_text else {}
            yield self._event(name, text=self._part["text"], **self._place(), **extra)
            yield self._event("response.content_part.done", part=dict(self._part), **self._place())
        yield self._event("response.output_item.done", item=dict(item))

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, **fields}


def _new(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
