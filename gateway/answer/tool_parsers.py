"""Tool calls in a model's text: between markers (Hermes, Qwen, Mistral), or as bare JSON (Llama 3 and others)."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from gateway.answer.call_object import CallObject
from gateway.answer.pieces import Content, Event

_BLANK = " \t\r\n"


def partial_marker(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``marker``."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class _Mode(Enum):
    TEXT = auto()
    BODY = auto()  # after a marker, or between calls
    NAME = auto()
    CALL = auto()


class MarkedCalls:
    """Calls that begin with a marker; all else is content, but for blanks beside calls.

    After ``start`` come objects or a list of them, up to ``end`` where there is one. With ``named`` also the form
    ``name[ARGS]{...}`` of newer Mistral models.
    """

    def __init__(self, start: str, end: str = "", *, named: bool = False) -> None:
        self._start = start
        self._end = end
        self._named = named
        self._held = ""
        self._mode = _Mode.TEXT
        self._call = CallObject()
        self._in_list = False
        self._any_call = False
        self._opened = ""  # text since the marker, for when it was none

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def end(self) -> list[Event]:
        raw = self._call.raw if self._mode is _Mode.CALL and not self._call.started else ""
        rest = self._opened + raw + self._held
        self._held = self._opened = ""
        if self._any_call:
            rest = rest.strip(_BLANK)
        return [Content(rest)] if rest else []

    def _step(self, events: list[Event]) -> bool:
        """One move; False when more text is needed."""
        match self._mode:
            case _Mode.TEXT:
                return self._text(events)
            case _Mode.BODY:
                return self._body(events)
            case _Mode.NAME:
                return self._read_name()
            case _Mode.CALL:
                return self._read_call(events)

    def _text(self, events: list[Event]) -> bool:
        if self._any_call:
            self._held = self._held.lstrip(_BLANK)
        at = self._held.find(self._start)
        if at < 0:
            sure = self._held[: len(self._held) - partial_marker(self._held, self._start)].rstrip(_BLANK)
            self._held = self._held[len(sure) :]
            self._say(sure, events)
            return False
        sure = self._held[:at].rstrip(_BLANK)
        self._say(sure, events)
        self._opened = self._held[len(sure) : at + len(self._start)]
        self._held = self._held[at + len(self._start) :]
        self._mode, self._in_list = _Mode.BODY, False
        return True

    def _body(self, events: list[Event]) -> bool:
        text = self._held.lstrip(_BLANK + (",;" if not self._opened else ""))
        if self._opened:
            self._opened += self._held[: len(self._held) - len(text)]
        self._held = text
        if not text or (self._end and len(text) < len(self._end) and self._end.startswith(text)):
            return False
        if self._end and text.startswith(self._end):
            self._held = text[len(self._end) :]
            self._mode, self._opened = _Mode.TEXT, ""
        elif text[0] == "[" and self._opened and not self._in_list:
            self._in_list = True
            self._opened += "["
            self._held = text[1:]
        elif text[0] == "]" and self._in_list:
            self._in_list = False
            self._held = text[1:]
            self._mode = _Mode.BODY if self._end else _Mode.TEXT
        elif text[0] == "{":
            self._call = CallObject()
            self._mode = _Mode.CALL
        elif self._named and self._opened and not self._in_list:
            self._mode = _Mode.NAME
        else:
            self._give_up(events)
        return True

    def _read_name(self) -> bool:
        brace = self._held.find("{")
        if brace < 0:
            return False
        name = self._held[:brace].partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip(_BLANK)
        self._opened += self._held[:brace]
        self._held = self._held[brace:]
        self._call = CallObject(name)
        self._mode = _Mode.CALL
        return True

    def _read_call(self, events: list[Event]) -> bool:
        made, self._held = self._call.feed(self._held)
        events += made
        if self._call.started:
            self._any_call, self._opened = True, ""
        if self._call.broken:
            if not self._call.started:
                self._held = self._call.raw + self._held
            self._give_up(events)
        elif self._call.done:
            self._mode = _Mode.BODY if self._end or self._in_list else _Mode.TEXT
        else:
            return False
        return True

    def _give_up(self, events: list[Event]) -> None:
        """What the marker announced is no call: it was text."""
        self._say(self._opened, events)
        self._opened = ""
        self._mode = _Mode.TEXT

    def _say(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(Content(text))


class BareCalls:
    """The whole answer is one call or several, as JSON objects that name a known tool; anything else is content.

    Args:
        names: of the tools.
        prefixes: what may come before the first object.
    """

    def __init__(self, names: Collection[str], prefixes: tuple[str, ...]) -> None:
        self._names = names
        self._prefixes = prefixes
        self._held = ""
        self._skipped = ""  # taken for the wrapping of calls, until there is one
        self._mode = _Mode.BODY
        self._call = CallObject()
        self._any_call = False

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def end(self) -> list[Event]:
        events: list[Event] = []
        if self._mode is _Mode.CALL and self._call.started:
            return events
        raw = self._call.raw if self._mode is _Mode.CALL else ""
        rest = raw + self._held if self._any_call else self._skipped + raw + self._held
        if rest and (not self._any_call or rest.strip(_BLANK)):
            events.append(Content(rest))
        self._held = self._skipped = ""
        return events

    def _step(self, events: list[Event]) -> bool:
        match self._mode:
            case _Mode.TEXT:
                if self._held:
                    events.append(Content(self._held))
                    self._held = ""
                return False
            case _Mode.BODY:
                return self._body()
            case _:
                return self._read_call(events)

    def _body(self) -> bool:
        wrapping = _BLANK + ("[" if not self._any_call else ",;]`")
        text = self._held.lstrip(wrapping)
        self._skip(len(self._held) - len(text))
        if not text:
            return False
        if not self._any_call:
            if any(p.startswith(text) and p != text for p in self._prefixes):
                return False
            if prefix := next((p for p in self._prefixes if text.startswith(p)), None):
                self._skip(len(prefix))
                return True
        if text[0] == "{":
            self._call = CallObject()
            self._mode = _Mode.CALL
        else:
            self._be_text("")
        return True

    def _read_call(self, events: list[Event]) -> bool:
        started = self._call.started
        made, self._held = self._call.feed(self._held)
        if self._call.name is not None and not started and self._call.name not in self._names:
            self._be_text(self._call.raw)
            return True
        events += made
        self._any_call = self._any_call or self._call.started
        if self._call.broken:
            self._be_text("" if self._call.started else self._call.raw)
        elif self._call.done:
            self._mode = _Mode.BODY
        else:
            return False
        return True

    def _skip(self, length: int) -> None:
        self._skipped += self._held[:length]
        self._held = self._held[length:]

    def _be_text(self, raw: str) -> None:
        self._held = ("" if self._any_call else self._skipped) + raw + self._held
        self._skipped = ""
        self._mode = _Mode.TEXT
