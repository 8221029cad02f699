"""Control tokens: which strings they are, how user text is kept from becoming one, how rendered text is cut at them.

A *control token* is an added token of the tokenizer that steers the model: every special token, and every other
added token that the chat template writes itself (``<tool_call>`` and the like).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

#: Placeholders come from this private-use plane; those that a request's own text uses are left out.
_PLACEHOLDERS = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a rendered prompt: a control token of the template's own, or ordinary text (``token_id`` None)."""

    text: str
    token_id: int | None = None


class ControlTokens:
    """The control tokens of one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        template = _template_text(tokenizer)
        named = set(tokenizer.all_special_tokens)
        added = {str(t): (i, t) for i, t in tokenizer.added_tokens_decoder.items() if str(t).strip()}
        special = {text for text, (_, token) in added.items() if token.special or text in named}
        written = {text for text in added if text in template}
        self._ids = {text: added[text][0] for text in special | written}
        self._tokens = {text: added[text][1] for text in self._ids}
        self._special = _any_of(special)
        self._all = _any_of(self._ids)
        self._overlapping = re.compile(f"(?=({self._all.pattern}))")

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(self._ids.values())

    @property
    def texts(self) -> frozenset[str]:
        return frozenset(self._ids)

    def mask(self, messages: list[dict[str, Any]], rest: Any) -> tuple[list[dict[str, Any]], Any, dict[int, str]]:
        """Replace every control token in what the client sent by a placeholder character of its own.

        An assistant's earlier answer may hold tokens that are not special, such as ``<think>``: the model wrote
        them, and templates look for them.

        Returns:
            messages, rest (tools and template arguments), and the texts by placeholder for ``str.translate``.
        """
        if not any(self._all.search(text) for text in _strings([messages, rest])):
            return messages, rest, {}
        masker = _Masker(_strings([messages, rest]))
        masked = [
            masker.mask(message, self._special if message.get("role") == "assistant" else self._all)
            for message in messages
        ]
        return masked, masker.mask(rest, self._all), masker.texts

    def cut(self, rendered: str, placeholders: dict[int, str]) -> list[Span]:
        """Cut at the template's own control tokens and put the masked texts back between them.

        Tokens that swallow blanks beside them (``lstrip``, ``rstrip``) do so as in the tokenizer.
        """
        spans: list[Span] = []
        start = 0
        strip_next = False

        def ordinary(text: str, strip_end: bool) -> None:
            text = text.lstrip() if strip_next else text
            text = text.rstrip() if strip_end else text
            if text:
                spans.append(Span(text.translate(placeholders) if placeholders else text))

        for match in self._all.finditer(rendered):
            token = self._tokens[match.group()]
            ordinary(rendered[start : match.start()], token.lstrip)
            spans.append(Span(match.group(), self._ids[match.group()]))
            start, strip_next = match.end(), token.rstrip
        ordinary(rendered[start:], False)
        return spans

    def break_up(self, text: str) -> list[str]:
        """Pieces of the text, none of which holds a control token; joined they are the text."""
        cuts = [0, *(match.start() + 1 for match in self._overlapping.finditer(text)), len(text)]
        return [text[a:b] for a, b in pairwise(cuts) if a < b]


class _Masker:
    def __init__(self, strings: Iterator[str]) -> None:
        used = {ord(char) for text in strings for char in text if ord(char) >= _PLACEHOLDERS.start}
        self._free = (code for code in _PLACEHOLDERS if code not in used)
        self._codes: dict[str, int] = {}

    @property
    def texts(self) -> dict[int, str]:
        return {code: text for text, code in self._codes.items()}

    def mask(self, value: Any, tokens: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return tokens.sub(lambda match: chr(self._code(match.group())), value)
        if isinstance(value, Mapping):
            return {self.mask(key, tokens): self.mask(item, tokens) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mask(item, tokens) for item in value]
        return value

    def _code(self, text: str) -> int:
        if text not in self._codes:
            self._codes[text] = next(self._free)
        return self._codes[text]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _any_of(texts: Any) -> re.Pattern[str]:
    """Leftmost-longest, as the tokenizer finds them."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _template_text(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""
