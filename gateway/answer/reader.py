"""From an engine's deltas to the pieces of an answer that clients see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.answer.pieces import CallArguments, CallPiece, CallStart, Content, Event, Piece, ToolParser
from gateway.answer.thoughts import ThoughtSplitter
from gateway.engine.types import Delta, FinishReason, TokenLogprobs
from gateway.protocol.logprobs import BytesOf, LogprobAligner


class AnswerReader:
    """Reads one answer, delta by delta.

    Args:
        bytes_of: bytes of a token id, where log-probabilities were asked for.
        thoughts: parts the thought from the answer, of models that think.
        tools: finds calls, where tools may be called.
        call_id: makes the ids of calls.
        parallel: whether more than one call is wanted; later ones are dropped otherwise.
    """

    def __init__(
        self,
        *,
        bytes_of: BytesOf | None = None,
        thoughts: ThoughtSplitter | None = None,
        tools: ToolParser | None = None,
        call_id: Callable[[], str] = str,
        parallel: bool = True,
    ) -> None:
        self._aligner = LogprobAligner(bytes_of) if bytes_of is not None else None
        self._thoughts = thoughts
        self._tools = tools
        self._call_id = call_id
        self._parallel = parallel
        self._calls = 0

    def read(self, delta: Delta) -> Piece:
        """What this delta adds; with the last one, also all that was held back."""
        last = delta.finish_reason is not None
        reasoning, text = self._part(delta.text, last)
        content, calls = self._find_calls(text, last)
        return Piece(content, reasoning, calls, self._logprobs(delta))

    def finish_reason(self, reason: FinishReason) -> str:
        """The reason in the API's words; only STOP and LENGTH end an answer that clients see."""
        return "tool_calls" if self._calls and reason is FinishReason.STOP else reason.value

    def _part(self, text: str, last: bool) -> tuple[str, str]:
        if self._thoughts is None:
            return "", text
        reasoning, answer = self._thoughts.feed(text)
        if last:
            late_reasoning, late = self._thoughts.end()
            return reasoning + late_reasoning, answer + late
        return reasoning, answer

    def _find_calls(self, text: str, last: bool) -> tuple[str, tuple[CallPiece, ...]]:
        if self._tools is None:
            return text, ()
        events = self._tools.feed(text)
        if last:
            events += self._tools.end()
        content = "".join(event.text for event in events if isinstance(event, Content))
        return content, self._call_pieces(events)

    def _call_pieces(self, events: Sequence[Event]) -> tuple[CallPiece, ...]:
        pieces: list[CallPiece] = []
        for event in events:
            if isinstance(event, CallStart):
                pieces.append(CallPiece(self._calls, self._call_id(), event.name))
                self._calls += 1
            elif isinstance(event, CallArguments):
                index = self._calls - 1
                if pieces and pieces[-1].index == index:
                    start = pieces.pop()
                    pieces.append(CallPiece(index, start.id, start.name, start.arguments + event.text))
                else:
                    pieces.append(CallPiece(index, arguments=event.text))
        return tuple(piece for piece in pieces if self._parallel or piece.index == 0)

    def _logprobs(self, delta: Delta) -> tuple[TokenLogprobs, ...]:
        if self._aligner is None:
            return ()
        entries = self._aligner.add(delta.logprobs, delta.text)
        if delta.finish_reason is not None:
            # The end token has no entry: a stop that has one came from a stop string, or from a grammar's end.
            cut = delta.finish_reason is FinishReason.STOP and bool(delta.logprobs)
            entries += self._aligner.rest(cut=cut)
        return entries
