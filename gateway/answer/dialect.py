"""How one model writes tool calls and thoughts: chosen from its chat template, or by configuration."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.answer.pieces import ToolParser
from gateway.answer.thoughts import END_THINK, THINK, ThoughtSplitter
from gateway.answer.tool_parsers import BareCalls, MarkedCalls
from gateway.engine.grammar_spec import Chain, GrammarSpec, JsonSchema, Literal, OneOf, Regex, Repeat, TokenId, Until
from gateway.protocol.tools import MAX_REQUIRED_CALLS, Tool, ToolUse

#: Values of ``[model].tool_parser`` beside ``auto``.
FAMILIES = ("hermes", "llama3", "mistral", "json")

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a family writes calls: ``{"name": ..., <arguments>: {...}}``, and what stands around and between them."""

    arguments: str = "arguments"
    start: str = ""  # before all calls
    before: str = ""  # before each
    after: str = ""
    between: str = "\n"
    end: str = ""


_SYNTAX = {
    "hermes": CallSyntax(before="<tool_call>\n", after="\n</tool_call>"),
    "llama3": CallSyntax(arguments="parameters", between="; "),
    "mistral": CallSyntax(start="[TOOL_CALLS]", before="", between=", ", end="]"),
    "json": CallSyntax(),
}

#: Texts that parsers look for; where they are special tokens, the answer's text must show them.
_MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "json": (),
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """A model's way of writing calls and thoughts.

    Args:
        family: one of FAMILIES.
        thinks: whether answers may begin with a thought.
        added: ids of the tokenizer's added tokens by their text.
    """

    family: str
    thinks: bool
    added: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Any, tool_parser: str = "auto", reasoning_parser: str = "auto") -> Dialect:
        """The dialect of a tokenizer's model; the parsers are the keys of that name in ``[model]``."""
        template = tokenizer.chat_template
        text = "\n".join(template.values()) if isinstance(template, dict) else template or ""
        added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
        thinks = reasoning_parser == "think" or (
            reasoning_parser == "auto" and (THINK in text or END_THINK in text or THINK in added)
        )
        return cls(_family(text) if tool_parser == "auto" else tool_parser, thinks, added)

    def shown_tokens(self, use: ToolUse) -> frozenset[int]:
        """Special tokens that are part of the answer's text, because its parsers look for them."""
        texts = (*(_MARKERS[self.family] if use.tools else ()), *((THINK, END_THINK) if self.thinks else ()))
        return frozenset(self.added[text] for text in texts if text in self.added)

    def splitter(self, *, opened: bool) -> ThoughtSplitter | None:
        """What parts the thought from one answer; ``opened``: the prompt ends inside a thought."""
        return ThoughtSplitter(opened=opened) if self.thinks else None

    def parser(self, use: ToolUse) -> ToolParser | None:
        """A parser for one answer that may call these tools; None when there are none."""
        if not use.tools:
            return None
        match self.family:
            case "hermes":
                return MarkedCalls("<tool_call>", "</tool_call>")
            case "mistral":
                return MarkedCalls("[TOOL_CALLS]", named=True)
            case _:
                return BareCalls(use.names, ("<|python_tag|>", "```json", "```"))

    def call_id(self) -> str:
        """A fresh id; templates of Mistral models insist on nine letters and digits."""
        if self.family == "mistral":
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def grammar(self, use: ToolUse, structure: GrammarSpec | None, *, opened: bool) -> GrammarSpec | None:
        """What an answer must look like; None = free text. A thought in front of it is free.

        Calls that are forced leave no room for a structure; calls that are allowed are an alternative to it.
        """
        if use.forced:
            answer = self._calls(use.forced, use.most_forced)
        elif structure is None:
            return None
        elif use.tools:
            answer = OneOf((structure, self._calls(use.tools, MAX_REQUIRED_CALLS if use.parallel else 1)))
        else:
            answer = structure
        if not self.thinks:
            return answer
        rest = Chain((self._thought_end(), Regex(r"\n{0,2}"), answer))
        return rest if opened else OneOf((answer, Chain((self._marker(THINK), rest))))

    def _thought_end(self) -> GrammarSpec:
        if END_THINK in self.added:
            return Chain((Regex(r"(.|\n)*"), self._marker(END_THINK)))
        return Until(END_THINK)

    def _calls(self, tools: tuple[Tool, ...], most: int) -> GrammarSpec:
        """An answer that is nothing but calls to these tools."""
        syntax = _SYNTAX[self.family]
        calls = OneOf(tuple(self._call(tool, syntax) for tool in tools))
        repeated = Repeat(calls, Literal(syntax.between), most) if most > 1 else calls
        opening: tuple[GrammarSpec, ...] = ()
        if syntax.start:
            opening = (self._marker(syntax.start), Literal("["))
        return Chain((*opening, repeated, *((Literal(syntax.end),) if syntax.end else ())))

    def _call(self, tool: Tool, syntax: CallSyntax) -> GrammarSpec:
        # The schema stays the root of its own grammar: its "$ref"s count from there.
        head = f'{{"name": {json.dumps(tool.name)}, "{syntax.arguments}": '
        arguments = JsonSchema({"type": "object", **tool.parameters}, strict=tool.strict, spaced=True)
        body: tuple[GrammarSpec, ...] = (Literal(head), arguments, Literal("}"))
        if syntax.before:
            marker, blank, end = syntax.before.rstrip(), "\n", syntax.after.lstrip()
            body = (self._marker(marker), Literal(blank), *body, Literal(blank), self._marker(end))
        return Chain(body)

    def _marker(self, text: str) -> GrammarSpec:
        return TokenId(self.added[text]) if text in self.added else Literal(text)


def _family(template: str) -> str:
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template or "tools" not in template:
        return "hermes"  # the second is the fallback of gateway.prompt.tools
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return "llama3"
    return "json"
