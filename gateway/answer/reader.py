"""From an engine's deltas to the pieces of an answer that clients see."""

from __future__ import annotations

from gateway.answer.pieces import Piece
from gateway.engine.types import Delta, FinishReason, TokenLogprobs
from gateway.protocol.logprobs import BytesOf, LogprobAligner


class AnswerReader:
    """Reads one answer, delta by delta.

    Args:
        bytes_of: bytes of a token id, where log-probabilities were asked for.
    """

    def __init__(self, *, bytes_of: BytesOf | None = None) -> None:
        self._aligner = LogprobAligner(bytes_of) if bytes_of is not None else None

    def read(self, delta: Delta) -> Piece:
        """What this delta adds; with the last one, also all that was held back."""
        logprobs: tuple[TokenLogprobs, ...] = ()
        if self._aligner is not None:
            logprobs = self._aligner.add(delta.logprobs, delta.text)
            if delta.finish_reason is not None:
                # The end token has no entry: a stop that has one came from a stop string.
                cut = delta.finish_reason is FinishReason.STOP and bool(delta.logprobs)
                logprobs += self._aligner.rest(cut=cut)
        return Piece(content=delta.text, logprobs=logprobs)

    def finish_reason(self, reason: FinishReason) -> str:
        """The reason in the API's words; only STOP and LENGTH end an answer that clients see."""
        return reason.value
