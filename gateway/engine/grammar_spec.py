"""What an answer must look like, as small values that can be combined; written out in llguidance's Lark dialect.

The dialect: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

#: Unbounded whitespace is where small models get lost; this holds any indentation that people read.
_WHITESPACE = r"[ \n\r\t]{0,24}"


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that conforms to ``schema``.

    ``strict`` refuses schemas with keywords that can't be enforced, else these are left out. ``spaced`` allows one
    form only, that of ``json.dumps``; otherwise whitespace is the model's choice.
    """

    schema: Mapping[str, Any]
    strict: bool = False
    spaced: bool = False


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that matches as a whole (syntax of Rust's ``regex`` crate: no look-around, no back references)."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class TokenId:
    """Exactly this token, for control tokens that no text spells."""

    token_id: int


@dataclass(frozen=True, slots=True)
class Lark:
    """A grammar of the client's own, in Lark or GBNF, that begins at its rule ``start`` or ``root``."""

    text: str


@dataclass(frozen=True, slots=True)
class Until:
    """Any text up to and with ``end``."""

    end: str


@dataclass(frozen=True, slots=True)
class Chain:
    parts: tuple[GrammarSpec, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    parts: tuple[GrammarSpec, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """``part`` once up to ``most`` times, with ``separator`` between."""

    part: GrammarSpec
    separator: GrammarSpec
    most: int


GrammarSpec = JsonSchema | Regex | Literal | TokenId | Lark | Until | Chain | OneOf | Repeat


def render(spec: GrammarSpec) -> str:
    """The grammar as llguidance takes it.

    Raises:
        ValueError: the client's own grammar can't be read.
    """
    writer = _Writer()
    top = writer.symbol(spec)
    main = {"lark_grammar": "\n".join([f"start: {top}", *writer.rules])}
    if not writer.grammars:
        return str(LLMatcher.grammar_from_lark(main["lark_grammar"]))
    return json.dumps({"grammars": [main, *writer.grammars]})


class _Writer:
    """Gives every part a rule of its own, so that nothing depends on precedence."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._count = 0

    def symbol(self, spec: GrammarSpec) -> str:
        match spec:
            case Literal(text):
                return json.dumps(text, ensure_ascii=False)
            case TokenId(token_id):
                return f"<[{token_id}]>"
            case Lark(text):
                name = f"own_{len(self.grammars)}"
                self.grammars.append({"name": name, "lark_grammar": _as_lark(text)})
                return f"@{name}"
            case JsonSchema():
                return self._rule(f"%json {json.dumps(_with_options(spec))}")
            case Regex(pattern):
                return self._rule(f"/{regex_to_lark(_unanchored(pattern))}/")
            case Until(end):
                # Lazy: the first ``end`` ends it.
                return self._rule(f"/(.|\\n)*{regex_to_lark(re.escape(end))}/", options="[lazy]")
            case Chain(parts):
                return self._rule(" ".join(self.symbol(part) for part in parts))
            case OneOf(parts):
                return self._rule(" | ".join(self.symbol(part) for part in parts))
            case Repeat(part, separator, most):
                one = self.symbol(part)
                return self._rule(f"{one} ({self.symbol(separator)} {one}){{0,{most - 1}}}")

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{self._count}"
        self._count += 1
        self.rules.append(f"{name}{options}: {body}")
        return name


def _as_lark(text: str) -> str:
    try:
        return str(any_to_lark(text))
    except Exception as error:  # its reader of GBNF raises what it comes upon
        raise ValueError(str(error) or type(error).__name__) from error


def _with_options(spec: JsonSchema) -> dict[str, Any]:
    options: dict[str, Any] = {"lenient": not spec.strict}
    if spec.spaced:
        options |= {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    else:
        options |= {"whitespace_pattern": _WHITESPACE}
    return {**spec.schema, "x-guidance": options}


def _unanchored(pattern: str) -> str:
    """A pattern always matches as a whole; the anchors that say so are no part of the syntax."""
    pattern = pattern.removeprefix("^")
    backslashes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and backslashes % 2 == 0 else pattern
