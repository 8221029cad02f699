"""Reasoning models: the thought at the beginning of an answer, parted from the answer."""

from __future__ import annotations

from enum import Enum, auto

from gateway.answer.tool_parsers import partial_marker

THINK, END_THINK = "<think>", "</think>"

_BLANK = " \t\r\n"


class _Mode(Enum):
    START = auto()
    THOUGHT = auto()
    AFTER = auto()  # blanks between thought and answer are nobody's
    ANSWER = auto()


class ThoughtSplitter:
    """Parts ``<think>...</think>`` at the beginning of an answer from the rest; markers and blanks around them go.

    Args:
        opened: the prompt ends inside a thought already (many templates write ``<think>`` themselves).
    """

    def __init__(self, *, opened: bool = False) -> None:
        self._mode = _Mode.THOUGHT if opened else _Mode.START
        self._held = ""
        self._any_thought = False

    def feed(self, text: str) -> tuple[str, str]:
        """(thought, answer) that became certain."""
        self._held += text
        thought = answer = ""
        if self._mode is _Mode.START:
            self._start()
        if self._mode is _Mode.THOUGHT:
            thought = self._thought()
        if self._mode is _Mode.AFTER:
            self._held = self._held.lstrip(_BLANK)
            if self._held:
                self._mode = _Mode.ANSWER
        if self._mode is _Mode.ANSWER:
            answer, self._held = self._held, ""
        return thought, answer

    def end(self) -> tuple[str, str]:
        """The answer is over: what was held back in doubt."""
        rest, self._held = self._held, ""
        return (rest.rstrip(_BLANK), "") if self._mode is _Mode.THOUGHT else ("", rest)

    def _start(self) -> None:
        text = self._held.lstrip(_BLANK)
        if text.startswith(THINK):
            self._held = text[len(THINK) :]
            self._mode = _Mode.THOUGHT
        elif text and not THINK.startswith(text):
            self._mode = _Mode.ANSWER

    def _thought(self) -> str:
        if not self._any_thought:
            self._held = self._held.lstrip(_BLANK)
        at = self._held.find(END_THINK)
        if at >= 0:
            thought, self._held = self._held[:at].rstrip(_BLANK), self._held[at + len(END_THINK) :]
            self._mode = _Mode.AFTER
        else:
            thought = self._held[: len(self._held) - partial_marker(self._held, END_THINK)].rstrip(_BLANK)
            self._held = self._held[len(thought) :]
        self._any_thought = self._any_thought or bool(thought)
        return thought
