"""Log-probabilities in the API's two shapes, and which of them belong to a piece of text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gateway.engine.types import TokenLogprobs

#: Bytes of a token id.
BytesOf = Callable[[int], bytes]


class LogprobAligner:
    """Holds the entries of one answer until the text they made is sent.

    Text is late when a character or a stop string isn't decided yet; what a stop string cuts off has no entries.
    """

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self._held: deque[tuple[int, TokenLogprobs]] = deque()  # with the position of their first byte
        self._made = 0
        self._sent = 0

    def add(self, entries: Sequence[TokenLogprobs], text: str) -> tuple[TokenLogprobs, ...]:
        """Take a step's entries and the text it released; return the entries of all text so far."""
        for entry in entries:
            self._held.append((self._made, entry))
            self._made += len(self._bytes_of(entry.token_id))
        self._sent += len(text.encode())
        released = []
        while self._held and self._held[0][0] < self._sent:
            released.append(self._held.popleft()[1])
        return tuple(released)

    def rest(self, *, cut: bool) -> tuple[TokenLogprobs, ...]:
        """The entries left at the end; none of them count when the answer was ``cut`` by a stop string."""
        rest = () if cut else tuple(entry for _, entry in self._held)
        self._held.clear()
        return rest


def chat_logprobs(entries: Sequence[TokenLogprobs], bytes_of: BytesOf) -> dict[str, Any]:
    """The ``logprobs`` object of chat completions: true bytes, and their text with U+FFFD where it is cut."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        raw = bytes_of(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        {**shown(e.token_id, e.logprob), "top_logprobs": [shown(i, logprob) for i, logprob in e.top]} for e in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The ``logprobs`` object of plain completions, piece by piece of one answer.

    ``text_offset`` counts characters from the beginning of the choice's text. A token that is no whole text is
    written ``bytes:\\xf0\\x9f``, as the OpenAI API does: its bytes stay known, and keys stay apart.

    Args:
        bytes_of: bytes of a token id.
        offset: characters of echoed prompt in front of the answer.
    """

    def __init__(self, bytes_of: BytesOf, offset: int = 0) -> None:
        self._bytes_of = bytes_of
        self._chars = offset

    def piece(self, entries: Sequence[TokenLogprobs], *, top: bool) -> dict[str, Any]:
        """Object for these entries; ``top`` when alternatives were asked for."""
        offsets = []
        for entry in entries:
            offsets.append(self._chars)
            # Every byte of UTF-8 that doesn't continue a character begins one.
            self._chars += sum(byte & 0xC0 != 0x80 for byte in self._bytes_of(entry.token_id))
        return {
            "tokens": [self._name(e.token_id) for e in entries],
            "token_logprobs": [_finite(e.logprob) for e in entries],
            "top_logprobs": [self._top(e) for e in entries] if top else None,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        # As in the OpenAI API the chosen token is always there, so there may be one more than asked for.
        return {self._name(i): _finite(logprob) for i, logprob in (*entry.top, (entry.token_id, entry.logprob))}

    def _name(self, token_id: int) -> str:
        raw = self._bytes_of(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    """JSON has no infinity: -9999.0 is what the OpenAI API and vLLM write for a probability of nothing."""
    return max(logprob, -9999.0)
