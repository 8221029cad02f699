"""The normal form of what the model sees, so that equal requests have equal tokens and find each other's prefix.

Levels (``[prefix_cache].normalise``):

* ``off``: text as it came.
* ``safe``: CRLF becomes LF; tool schemas become canonical JSON. No reader sees a difference.
* ``nfc+space``: also Unicode NFC, and blanks at line ends go.

The parts of a message are joined to one string on every level: a template takes one string.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any


class NormaliseLevel(StrEnum):
    OFF = "off"
    SAFE = "safe"
    NFC_SPACE = "nfc+space"


#: Keys of the two outer levels of a tool, in the order models were trained on; all others are sorted.
_TOOL_KEYS = ("type", "function")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")


def join_parts(parts: Sequence[Any]) -> str:
    """Concatenate the text parts of a message without a separator: same tokens as one string.

    Raises:
        ValueError: no parts, or a part that isn't text.
    """
    if not parts:
        raise ValueError("content must not be an empty list; send a string or at least one text part")
    return "".join(_part_text(part) for part in parts)


def _part_text(part: Any) -> str:
    if not isinstance(part, Mapping):
        raise ValueError('each content part must be an object such as {"type": "text", "text": "..."}')
    kind = part.get("type")
    if kind != "text":
        raise ValueError(f"content part type {str(kind)[:40]!r} is not supported: this model takes text parts only")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError('a text part needs its text as a string: {"type": "text", "text": "..."}')
    return text


class Normaliser:
    """Brings texts and tool schemas to the configured normal form."""

    def __init__(self, level: str = NormaliseLevel.SAFE) -> None:
        self.level = NormaliseLevel(level)

    def text(self, text: str) -> str:
        if self.level is NormaliseLevel.OFF:
            return text
        if "\r" in text:
            text = text.replace("\r\n", "\n")
        if self.level is NormaliseLevel.NFC_SPACE:
            text = unicodedata.normalize("NFC", text)
            text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
        return text

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The tools with their keys in one order, and their texts normalised. The order of tools is kept."""
        if self.level is NormaliseLevel.OFF:
            return [dict(tool) for tool in tools]
        return [self._tool(tool) for tool in tools]

    def _tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        ordered = _ordered(tool, _TOOL_KEYS)
        function = ordered.get("function")
        canonical = {key: self._canonical(value) for key, value in ordered.items()}
        if isinstance(function, Mapping):
            canonical["function"] = {
                key: self._canonical(value) for key, value in _ordered(function, _FUNCTION_KEYS).items()
            }
        return canonical

    def _canonical(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self._canonical(value[key]) for key in sorted(value)}
        if isinstance(value, list):
            return [self._canonical(item) for item in value]
        return value


def _ordered(mapping: Mapping[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    known = [key for key in first if key in mapping]
    return {key: mapping[key] for key in known + sorted(set(mapping) - set(known))}
