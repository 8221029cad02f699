"""Server-sent events of an upstream: cut at their borders without changing a byte, and read for usage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

#: An event ends with a blank line; lines end with LF, CRLF or CR.
_BORDER = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n")
_LINE = re.compile(rb"\r\n|\n|\r")

#: No API sends a larger event; more is a broken upstream, and must not fill memory.
MAX_EVENT_BYTES = 16 * 2**20


class EventTooLarge(Exception):
    """The upstream sends no event borders."""


@dataclass(frozen=True, slots=True)
class UpstreamEvent:
    raw: bytes  # as it came, with its blank line
    data: bytes  # the data lines, joined

    @property
    def is_done(self) -> bool:
        return self.data.strip() == b"[DONE]"

    @property
    def json(self) -> dict[str, Any] | None:
        """The data as an object; None for comments and whatever else isn't one."""
        try:
            parsed = orjson.loads(self.data)
        except orjson.JSONDecodeError:
            return None
        return parsed if isinstance(parsed, dict) else None


class EventSplitter:
    """Collects bytes, cut anywhere, into whole events. A character cut in two is whole again in its event."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> Iterator[UpstreamEvent]:
        """Events that are complete now.

        Raises:
            EventTooLarge: what is held has no end.
        """
        searched = max(0, len(self._held) - 3)
        self._held += data
        start = 0
        while (border := _BORDER.search(self._held, max(start, searched))) is not None:
            yield _event(self._held[start : border.end()])
            start = border.end()
        self._held = self._held[start:]
        if len(self._held) > MAX_EVENT_BYTES:
            raise EventTooLarge

    def finish(self) -> UpstreamEvent | None:
        """What is held when the upstream ends without a last blank line, if it is whole; it gets its blank line."""
        left = _event(self._held.rstrip(b"\r\n") + b"\n\n")
        self._held = b""
        return left if left.is_done or left.json is not None else None


def _event(raw: bytes) -> UpstreamEvent:
    lines = [line.removeprefix(b"data:") for line in _LINE.split(raw) if line.startswith(b"data:")]
    return UpstreamEvent(raw, b"\n".join(line.removeprefix(b" ") for line in lines))


@dataclass(slots=True)
class UpstreamTally:
    """What a forwarded request cost, in tokens, as far as the upstream tells.

    Usage comes in a chunk of its own with ``choices: []`` or without ``choices``, on the chunk with the finish reason,
    or grows in every chunk: the last one counts. Without any, each piece of text counts as one token.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reported: bool = False
    failed: bool = False

    def note(self, body: dict[str, Any]) -> None:
        """Read a chunk or a whole answer."""
        if body.get("error"):
            self.failed = True
        usage = body.get("usage")
        for key in ("message", "response"):  # Anthropic's message_start, the Responses API's last event
            if usage is None and isinstance(body.get(key), dict):
                usage = body[key].get("usage")
        if isinstance(usage, dict):
            self._note_usage(usage)
        elif not self.reported:
            self.completion_tokens += sum(_has_text(choice) for choice in body.get("choices") or [])

    def _note_usage(self, usage: dict[str, Any]) -> None:
        """In the shape of chat completions, of the Responses API, or Anthropic's (its counts come in parts)."""
        self.reported = True
        if "input_tokens" not in usage and "prompt_tokens" not in usage:
            self.completion_tokens = _count(usage.get("output_tokens"))
            return
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        read, written = _count(usage.get("cache_read_input_tokens")), _count(usage.get("cache_creation_input_tokens"))
        told = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
        self.prompt_tokens = _count(usage.get("prompt_tokens")) or _count(usage.get("input_tokens")) + read + written
        self.completion_tokens = _count(usage.get("completion_tokens")) or _count(usage.get("output_tokens"))
        self.cached_tokens = told or read


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _has_text(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    return bool(choice.get("text") or (isinstance(delta, dict) and (delta.get("content") or delta.get("tool_calls"))))
