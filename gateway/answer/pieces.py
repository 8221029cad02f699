"""What a model's text is made of: content, reasoning, tool calls. The output of every parser in this room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from gateway.engine.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; the arguments that follow are its own."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the running call's arguments: JSON text as the model wrote it."""

    text: str


Event = Content | CallStart | CallArguments


class ToolParser(Protocol):
    """Reads one answer's text in pieces of any size. The events' joined texts don't depend on where it was cut."""

    def feed(self, text: str) -> list[Event]: ...

    def end(self) -> list[Event]:
        """The answer is over: what was held back in doubt."""
        ...


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Part of the tool call at ``index``. ``id`` and ``name`` are set in its first piece only."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step of a running answer adds to it."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs)


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


def whole_calls(pieces: Iterable[CallPiece]) -> tuple[ToolCall, ...]:
    """Join the pieces of an answer's calls, in the order they were made."""
    heads: dict[int, CallPiece] = {}
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        heads.setdefault(piece.index, piece)
        arguments.setdefault(piece.index, []).append(piece.arguments)
    return tuple(
        ToolCall(head.id or "", head.name or "", "".join(arguments[index])) for index, head in sorted(heads.items())
    )
