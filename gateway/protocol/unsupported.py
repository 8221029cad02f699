"""Parameters of the OpenAI and vLLM APIs that have no effect here: named and refused when a request uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.protocol.errors import UnsupportedParameter


@dataclass(frozen=True, slots=True)
class Rule:
    param: str
    used: Callable[[Any], bool]
    remedy: str


def _given(value: Any) -> bool:
    return value is not None


def _truthy(value: Any) -> bool:
    return bool(value)


def _above(limit: float) -> Callable[[Any], bool]:
    return lambda value: value is not None and value != limit


_COMMON = (
    Rule("use_beam_search", _truthy, "leave it out and sample instead"),
    Rule("min_tokens", _truthy, "leave it out, or use ignore_eos with max_tokens"),
    Rule("bad_words", _truthy, "use logit_bias with the tokens' ids instead"),
    Rule("prompt_logprobs", _given, "leave it out; a cached prefix has no log-probabilities"),
    Rule("length_penalty", _above(1), "leave it out"),
)

_CHAT = (
    Rule("functions", _truthy, "describe the functions in a message instead"),
    Rule("audio", _given, "leave it out; answers are text"),
    Rule("modalities", lambda value: value not in (None, [], ["text"]), 'leave it out or send ["text"]'),
    Rule("web_search_options", _given, "leave it out"),
    Rule("documents", _truthy, "put the documents into a message"),
    Rule("chat_template", _given, "the model's own template is used; leave it out"),
)

_COMPLETION = (
    Rule("best_of", _above(1), "leave it out or send 1; use n for more answers"),
    Rule("suffix", _truthy, "leave it out; this model can't insert text before a suffix"),
    Rule("prompt_embeds", _given, "send the prompt as text or token ids"),
)


def refuse_unsupported_chat(body: Mapping[str, Any]) -> None:
    """Raises UnsupportedParameter."""
    _apply(_COMMON + _CHAT, body)


def refuse_unsupported_completion(body: Mapping[str, Any]) -> None:
    """Raises UnsupportedParameter."""
    _apply(_COMMON + _COMPLETION, body)


def _apply(rules: tuple[Rule, ...], body: Mapping[str, Any]) -> None:
    for rule in rules:
        if rule.used(body.get(rule.param)):
            raise UnsupportedParameter(rule.param, rule.remedy)
