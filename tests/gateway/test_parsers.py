"""Parsers of tool calls and thoughts: what they find, wherever the stream is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from gateway.answer.pieces import CallStart, Content, ToolParser
from gateway.answer.thoughts import ThoughtSplitter
from gateway.answer.tool_parsers import BareCalls, MarkedCalls

Found = list[tuple[str, ...]]


def hermes() -> ToolParser:
    return MarkedCalls("<tool_call>", "</tool_call>")


def mistral() -> ToolParser:
    return MarkedCalls("[TOOL_CALLS]", named=True)


def bare() -> ToolParser:
    return BareCalls(["f", "g"], ("<|python_tag|>", "```json", "```"))


def found(make: Callable[[], ToolParser], pieces: Sequence[str]) -> Found:
    """Content as ("text",), calls as ("name", "arguments"); neighbouring pieces joined."""
    parser, out = make(), [("",)]
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.end()
    for event in events:
        if isinstance(event, CallStart):
            out.append((event.name, ""))
        elif isinstance(event, Content):
            out[-1:] = [(out[-1][0] + event.text,)] if len(out[-1]) == 1 else [out[-1], (event.text,)]
        else:
            assert len(out[-1]) == 2, "arguments belong to the call just begun"
            out[-1] = (out[-1][0], out[-1][1] + event.text)
    return [item for item in out if item != ("",)]


def cuts(text: str) -> list[list[str]]:
    """The text in one piece, in characters, in pieces of two and three, and cut in two and in three at every place."""
    ways = [[text], list(text), *[[text[i : i + n] for i in range(0, len(text), n)] for n in (2, 3)]]
    places = range(len(text) + 1)
    ways += [[text[:i], text[i:]] for i in places]
    return ways + [[text[a:b] for a, b in pairwise((0, i, min(i + 3, len(text)), len(text)))] for i in places]


CASES: list[tuple[Callable[[], ToolParser], str, Found]] = [
    (hermes, "plain < text <tool> \n", [("plain < text <tool> \n",)]),
    (hermes, "", []),
    (hermes, 'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{"}}\n</tool_call>', [("Sure.",), ("f", '{"a": "}\\"{"}')]),
    (hermes, '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"arguments": {"x": [1, {}]}, "name": "g"}</tool_call>\n',
     [("f", "{}"), ("g", '{"x": [1, {}]}')]),
    (hermes, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> done', [("f", '{"a": 1}'), ("done",)]),
    (hermes, '<tool_call>{"name": "f", "id": 5, "ok": true}</tool_call>', [("f", "{}")]),
    (hermes, '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_call>', [("f", "{}"), ("g", "{}")]),
    (hermes, '<tool_call>{"name": "f", "arguments": {}} <tool_call>{"name": "g", "arguments": {}}', [("f", "{}"), ("g", "{}")]),
    (hermes, '<tool_call>{"name": "f", "arguments": {"a": 1', [("f", '{"a": 1')]),
    (hermes, '<tool_call>{"name": "f\\u00e9", "arguments": {"ü": "🫠"}}</tool_call>', [("fé", '{"ü": "🫠"}')]),
    (hermes, 'x <tool_call>{"na', [('x <tool_call>{"na',)]),
    (hermes, "a <tool_", [("a <tool_",)]),
    (hermes, "x <tool_call>\n<function=f>", [("x <tool_call>\n<function=f>",)]),
    (hermes, '<tool_call>{"foo": 1}</tool_call> b', [('<tool_call>{"foo": 1}</tool_call> b',)]),
    (mistral, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', [("f", '{"a": 1}'), ("g", "{}")]),
    (mistral, 'Hi [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": {}}', [("Hi",), ("f", '{"a": 1}'), ("g", '{"b": {}}')]),
    (mistral, '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
    (mistral, "[TOOL_CALLS]f", [("[TOOL_CALLS]f",)]),
    (mistral, "a [1, 2] [TOOL", [("a [1, 2] [TOOL",)]),
    (bare, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', [("f", '{"a": 1}'), ("g", "{}")]),
    (bare, '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    (bare, '```json\n[{"name": "f", "arguments": {}}]\n```', [("f", "{}")]),
    (bare, '{"arguments": {"a": 1}, "name": "f"} trailing', [("f", '{"a": 1}'), ("trailing",)]),
    (bare, '{"name": "Bob", "age": 3}', [('{"name": "Bob", "age": 3}',)]),
    (bare, ' {"a": [1', [(' {"a": [1',)]),
    (bare, "[1, 2]", [("[1, 2]",)]),
    (bare, "```python\nx\n```", [("```python\nx\n```",)]),
    (bare, 'hello {"name": "f"}', [('hello {"name": "f"}',)]),
    (bare, '{"name": "f", "arguments": {}}\n{"name": "Bob"}', [("f", "{}"), ('{"name": "Bob"}',)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "text", "expected"), CASES, ids=lambda value: getattr(value, "__name__", str(value))[:30]
)
def test_calls_are_found_wherever_the_stream_is_cut(make: Callable[[], ToolParser], text: str, expected: Found) -> None:
    for pieces in cuts(text):
        assert found(make, pieces) == expected, pieces


def test_arguments_go_out_while_they_are_written() -> None:
    parser = hermes()
    assert [type(e).__name__ for e in parser.feed('<tool_call>{"name": "f", "arguments": {"a')] == [
        "CallStart",
        "CallArguments",
    ]
    assert [e.text for e in parser.feed('": "long') if not isinstance(e, CallStart)] == ['": "long']
    assert parser.feed(" text") and hermes().feed("so much text"), "and so does content"


@pytest.mark.parametrize(
    ("opened", "text", "expected"),
    [
        (False, "<think>\nhm\n</think>\n\nYes.", ("hm", "Yes.")),
        (False, " \n<think>a <b </thin> c</think>Yes. <think>no</think>", ("a <b </thin> c", "Yes. <think>no</think>")),
        (False, " Yes <think>", ("", " Yes <think>")),
        (False, "<thinker>", ("", "<thinker>")),
        (False, "<thi", ("", "<thi")),
        (False, "<think></think>ok", ("", "ok")),
        (False, "<think>cut sho", ("cut sho", "")),
        (True, "\nhm  so\n</think>\n\nYes.\n", ("hm  so", "Yes.\n")),
        (True, "cut </thi", ("cut </thi", "")),
        (True, "", ("", "")),
    ],
)
def test_thoughts_are_parted_wherever_the_stream_is_cut(opened: bool, text: str, expected: tuple[str, str]) -> None:
    for pieces in cuts(text):
        splitter = ThoughtSplitter(opened=opened)
        parts = [*map(splitter.feed, pieces), splitter.end()]
        assert ("".join(t for t, _ in parts), "".join(a for _, a in parts)) == expected, pieces
