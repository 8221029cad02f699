"""Grammars: what each kind allows, where it ends, and what hostile ones cost."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

from gateway.engine.grammar import MAX_GRAMMAR_BYTES, GrammarCompiler, GrammarError
from gateway.engine.grammar_spec import (
    Chain,
    GrammarSpec,
    JsonSchema,
    Lark,
    Literal,
    OneOf,
    Regex,
    Repeat,
    TokenId,
    Until,
)

END = 2
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler(demo_tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(demo_tokenizer, len(demo_tokenizer), [END, 0])


def follows(compiler: GrammarCompiler, tokenizer: Any, spec: GrammarSpec, text: str) -> bool:
    """Whether the whole text is free token by token, with an end allowed after it (or the grammar over)."""
    matcher = compiler.compile(spec).matcher()
    for token in tokenizer.encode(text, add_special_tokens=False):
        if matcher.done or matcher.forbidden()[token]:
            return False
        matcher.accept(token)
    return matcher.done or not matcher.forbidden()[END]


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (JsonSchema(POINT), ['{"x": 1}', '{\n  "x": 1\n}'], ['{"x": "1"}', "{}", '{"x": 1, "y": 2}', '{"x": 1} ']),
        (JsonSchema(POINT, spaced=True), ['{"x": 1}'], ['{"x":1}', '{ "x": 1}']),
        (JsonSchema({"type": "object"}), ["{}", '{"a": [1, {"b": "🫠 \\n"}]}'], ["[]", "1", '{"a"}', "{'a': 1}"]),
        (JsonSchema({"type": "string", "not": {}}), ['"x"'], ["1"]),
        (Regex("[0-9]{3}/[a-z]+"), ["123/abc"], ["12/abc", "123/abcD", "123"]),
        (Regex("^a\\$$"), ["a$"], ["a", "^a$"]),
        (OneOf((Literal("yes"), Literal('n"o\n🫠'))), ["yes", 'n"o\n🫠'], ["no", "yesn", ""]),
        (Lark('start: "a" b+\nb: /[0-9]/'), ["a1", "a123"], ["a", "b"]),
        (Lark('root ::= "a" [0-9]+'), ["a1"], ["a", "ax"]),
        (Chain((Until("</think>"), Literal("!"))), ["hm\n</think>!", "</think>!"], ["!", "hm</think>x"]),
        (Repeat(Literal("x"), Literal(","), 3), ["x", "x,x,x"], ["", "x,", "x,x,x,x"]),
        (Chain((TokenId(1), Literal("a"))), ["<|im_start|>a"], ["a"]),
        (Chain((Literal("<"), JsonSchema({"$defs": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/n"}}))),
         ["<[1, 2]"], ['<["a"]']),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_a_grammar_allows(
    compiler: GrammarCompiler, demo_tokenizer: Any, spec: GrammarSpec, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert follows(compiler, demo_tokenizer, spec, text), text
    for text in bad:
        assert not follows(compiler, demo_tokenizer, spec, text), text


def test_the_grammar_ends_by_itself_or_by_an_end_token(compiler: GrammarCompiler, demo_tokenizer: Any) -> None:
    closed = compiler.compile(Literal("a")).matcher()
    (a,) = demo_tokenizer.encode("a")
    assert closed.forbidden()[[END, 0]].all() and not closed.forbidden()[a]
    closed.accept(a)
    assert closed.done
    open_ended = compiler.compile(Regex("a+")).matcher()
    open_ended.accept(a)
    assert not open_ended.done and not open_ended.forbidden()[[END, 0, a]].any()


def test_tokens_may_follow_before_the_mask_is_there(compiler: GrammarCompiler, demo_tokenizer: Any) -> None:
    digits = [demo_tokenizer.encode(digit)[0] for digit in "0123456789"]
    for _ in range(20):
        matcher = compiler.compile(JsonSchema({"type": "integer"})).matcher()
        for digit in digits[1:]:
            matcher.accept(digit)
        assert not matcher.forbidden()[digits].any()


def test_matchers_of_one_grammar_are_independent(compiler: GrammarCompiler, demo_tokenizer: Any) -> None:
    grammar = compiler.compile(Regex("ab|cd"))
    assert compiler.compile(Regex("ab|cd")) is grammar, "compiled once"
    first, second = grammar.matcher(), grammar.matcher()
    a, c = (demo_tokenizer.encode(letter)[0] for letter in "ac")
    first.accept(a)
    assert first.forbidden()[c] and not second.forbidden()[c]
    assert first.forbidden().dtype == torch.bool and first.forbidden().shape == (len(demo_tokenizer),)
    with pytest.raises(GrammarError):
        first.accept(c)


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}
BUSHY: dict[str, Any] = {"type": "object"}
for i in range(14):
    BUSHY = {"allOf": [BUSHY, {"anyOf": [{"properties": {f"{k}{i}": {"type": "string"}}} for k in "ab"]}]}


@pytest.mark.parametrize(
    "spec",
    [
        JsonSchema({"type": "strange"}), JsonSchema({"$ref": "http://example.com/x"}), JsonSchema({"$ref": "file:///etc/passwd"}),
        JsonSchema({"properties": {"a": False}, "required": ["a"], "type": "object"}), JsonSchema(DEEP), JsonSchema(BUSHY),
        JsonSchema({"not": {}}, strict=True), JsonSchema({"type": "string", "pattern": "("}), JsonSchema({"type": "object", "x": "y" * MAX_GRAMMAR_BYTES}),
        Regex("(a"), Regex("(?=a)b"), Regex("(a)\\1"),
        Lark("start: missing"), Lark("start: ((("), Lark("root ::= ((("), Lark("nothing"),
    ],
    ids=lambda spec: repr(spec)[:40],
)  # fmt: skip
def test_hostile_and_malformed_grammars_are_refused_soon(compiler: GrammarCompiler, spec: GrammarSpec) -> None:
    started = time.thread_time()
    with pytest.raises(GrammarError) as caught:
        compiler.compile(spec).matcher().forbidden()
    assert time.thread_time() - started < 2
    assert 10 < len(str(caught.value)) < 600 and "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}{1000}", "(a?){5000}a{5000}", "(.{0,1000}x){0,1000}"])
def test_a_short_regex_can_not_take_long(compiler: GrammarCompiler, demo_tokenizer: Any, pattern: str) -> None:
    """Without limits the first takes a process's memory, or three seconds a mask."""
    started = time.thread_time()
    with suppress(GrammarError):
        matcher = compiler.compile(Regex(pattern)).matcher()
        (a,) = demo_tokenizer.encode("a")
        for _ in range(5):
            matcher.forbidden()
            matcher.accept(a)
    assert time.thread_time() - started < 2


def test_large_real_schemas_compile(compiler: GrammarCompiler) -> None:
    wide = {"type": "object", "properties": {f"field_{i}": {"type": ["string", "null"]} for i in range(300)}}
    enum = {"enum": [f"value {i}" for i in range(2000)]}
    for schema in (wide, enum):
        assert len(json.dumps(schema)) < MAX_GRAMMAR_BYTES
        compiler.compile(JsonSchema(schema, strict=True)).matcher().forbidden()
