"""Token ids to text, a token at a time: whole characters only, stop strings never leaked."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

_REPLACEMENT = "\ufffd"

#: Prompt tokens decoded along, so that word-start markers of the first answer token come out right.
_CONTEXT_TOKENS = 6


class Detokeniser:
    """Incremental decoding of one answer.

    A token may end inside a character; its text is held until the character is whole. Decoding a short
    sliding window and taking the difference gives the same text as decoding everything at once.

    Args:
        tokenizer: a fast tokenizer of transformers.
        prompt_ids: the prompt, for context.
        stop: stop strings; the answer ends before the first that appears.
        shown: special tokens whose text is part of the answer's; all others are left out.
    """

    def __init__(
        self, tokenizer: Any, prompt_ids: list[int], stop: tuple[str, ...] = (), shown: Collection[int] = ()
    ) -> None:
        self._decode = tokenizer.backend_tokenizer.decode
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._prefix = 0
        self._read = len(self._ids)
        self._stop = stop
        self._shown = {token: tokenizer.convert_ids_to_tokens(token) for token in shown}
        self._held = ""  # text that may turn out to be the head of a stop string
        self.stop_string: str | None = None  # the one that was found

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def add(self, token_id: int) -> str:
        """Text that became certain with this token; sets ``stopped`` when a stop string is complete."""
        self._ids.append(token_id)
        if (shown := self._shown.get(token_id)) is not None:
            self._prefix, self._read = len(self._ids) - 1, len(self._ids)
            return self._release(shown)
        return self._release(self._new_text())

    def finish(self) -> str:
        """What is still held when the answer ends; an incomplete last character is left out."""
        known = self._decode(self._ids[self._prefix : self._read], skip_special_tokens=True)
        text = self._decode(self._ids[self._prefix :], skip_special_tokens=True)
        rest = self._held + text[len(known) :].rstrip(_REPLACEMENT)
        self._held = ""
        return "" if self.stopped else rest

    def _new_text(self) -> str:
        known = self._decode(self._ids[self._prefix : self._read], skip_special_tokens=True)
        text = self._decode(self._ids[self._prefix :], skip_special_tokens=True)
        if text.endswith(_REPLACEMENT) or len(text) <= len(known):
            return ""
        self._prefix = self._read
        self._read = len(self._ids)
        return str(text[len(known) :])

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stop_string = min(found)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
