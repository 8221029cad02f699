"""One tool call as a JSON object, read character by character: the arguments go out while they are written."""

from __future__ import annotations

import json
from enum import Enum, auto

from gateway.answer.pieces import CallArguments, CallStart, Event

_BLANK = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


class _At(Enum):
    OPEN = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    AFTER = auto()
    END = auto()


class CallObject:
    """Reads ``{"name": ..., "arguments": {...}}``, keys in any order, other keys left out.

    Arguments are passed on as they are written; a string of JSON (the API's own form) is unpacked first.

    ``done``: the object is closed. ``broken``: this is no call; ``raw`` is all that was read. ``name`` is set as soon
    as it is known, and from then on ``started``: the call has been announced.
    """

    def __init__(self, name: str | None = None) -> None:
        """With a ``name`` only the arguments are read, an object of their own."""
        self.raw = ""
        self.name = name
        self.done = False
        self.broken = False
        self._bare = name is not None
        self._key = "arguments" if self._bare else ""
        self._at = _At.VALUE if self._bare else _At.OPEN
        self._token = ""  # the key or value being read
        self._quoted = self._escaped = False
        self._depth = 0
        self._arguments = ""  # read, but not passed on
        self._has_arguments = False
        self._announced = False

    @property
    def started(self) -> bool:
        return self._announced

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Read on; the events that became certain, and what follows the object."""
        at = 0
        while at < len(text) and not (self.done or self.broken):
            at += self._step(text[at])
        self.raw += text[:at]
        return self._events(), text[at:]

    def _events(self) -> list[Event]:
        events: list[Event] = []
        if self.name is not None and not self._announced:
            self._announced = True
            events.append(CallStart(self.name))
        if self._announced and self._arguments:
            events.append(CallArguments(self._arguments))
            self._arguments = ""
        return events

    def _step(self, char: str) -> int:
        """Take one character; 0 when it belongs to what follows."""
        if self._at is _At.IN_KEY:
            self._in_key(char)
        elif self._at is _At.IN_VALUE:
            return self._in_value(char)
        elif char in _BLANK:
            pass
        elif self._at is _At.VALUE:
            self._begin_value(char)
        else:
            self._punctuation(char)
        return 1

    def _punctuation(self, char: str) -> None:
        match self._at, char:
            case _At.OPEN, "{":
                self._at = _At.KEY
            case _At.KEY, '"':
                self._at, self._token = _At.IN_KEY, '"'
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.AFTER, ",":
                self._at = _At.KEY
            case ((_At.AFTER | _At.KEY), "}"):
                self._close()
            case _:
                self.broken = True

    def _in_key(self, char: str) -> None:
        self._token += char
        if self._closes_string(char):
            self._key = _decoded(self._token)
            self._at = _At.COLON

    def _begin_value(self, char: str) -> None:
        self._at, self._token = _At.IN_VALUE, ""
        self._depth, self._quoted, self._escaped = 0, False, False
        if self._bare and char != "{":
            self.broken = True
            return
        self._in_value(char)

    def _in_value(self, char: str) -> int:
        if self._depth == 0 and self._token and self._token[0] not in '"{[' and char in ",}" + _BLANK:
            self._end_value()  # a number, true, false or null: it ends before what follows
            return 0
        self._token += char
        if self._key in _ARGUMENT_KEYS and self._token[0] != '"':
            self._arguments += char
        if self._quoted:
            self._quoted = not self._closes_string(char)
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if self._depth == 0 and not self._quoted and self._token[0] in '"{[':
            self._end_value()
        return 1

    def _closes_string(self, char: str) -> bool:
        escaped, self._escaped = self._escaped, char == "\\" and not self._escaped
        return char == '"' and not escaped

    def _end_value(self) -> None:
        self._at = _At.AFTER
        if self._key == "name":
            self.name = _decoded(self._token) or None
            self.broken = self.name is None
        elif self._key in _ARGUMENT_KEYS:
            self._has_arguments = True
            if self._token[0] == '"':
                self._arguments += _decoded(self._token)
        if self._bare:
            self._close()

    def _close(self) -> None:
        self._at = _At.END
        self.done = self.name is not None
        self.broken = not self.done
        if self.done and not self._has_arguments:
            self._arguments = "{}"


def _decoded(token: str) -> str:
    """The string that a JSON token stands for; empty when it is none."""
    try:
        value = json.loads(token)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
