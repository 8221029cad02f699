"""Where two prompts part, in which message, and the likely cause."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.prompt.divergence import common_length, likely_cause, locate
from gateway.prompt.encode import PromptEncoder
from gateway.protocol.requests import ChatRequest

LONG = "You help the staff of a harbour. " * 8


def parted(tokenizer: Any, ours: dict[str, Any], cached: dict[str, Any]) -> tuple[Any, str]:
    encoder = PromptEncoder(tokenizer)
    request = ChatRequest.parse(ours)
    ids, other = encoder.encode_chat(request), encoder.encode_chat(ChatRequest.parse(cached))
    at = common_length(ids, other)
    place = locate(encoder, ids, at, other[at:], request)
    return place, likely_cause(place, ["get_weather", "send_mail"])[0]


def chat(system: str, *turns: str) -> dict[str, Any]:
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": [{"role": "system", "content": system}, *messages]}


@pytest.mark.parametrize(
    ("ours", "cached", "cause"),
    [
        ("It is 2026-12-01 09:15. ", "It is 2026-11-30 18:02. ", "timestamp"),
        ("Now: Monday, Dec 1. ", "Now: Friday, Nov 28. ", "timestamp"),
        ("Session 1733043600 began. ", "Session 1733049999 began. ", "timestamp"),
        ("Trace 7f3a9c1e-55d0-4b0e-9a51-2f8c1be7d001. ", "Trace 0b1d2c3e-75d0-4b0e-8a51-2f8c1be7d999. ", "random_id"),
        ("Request req_8f3kq92mZx. ", "Request req_a71bs05cQp. ", "random_id"),
        ("Be kind and short. ", "Be kind  and short. ", "whitespace"),
        ("Speak of boats. ", "Speak of trains. ", "different_text"),
    ],
)
def test_the_cause_is_told_from_the_texts(tokenizer: Any, ours: str, cached: str, cause: str) -> None:
    place, found = parted(tokenizer, chat(LONG + ours + LONG, "Hi?"), chat(LONG + cached + LONG, "Hi?"))
    assert found == cause, place
    assert place.message_index == 0 and place.role == "system"


def test_the_message_is_found_in_a_long_conversation(tokenizer: Any) -> None:
    turns = [f"turn {i} of the conversation" for i in range(9)]
    changed = [*turns]
    changed[6] = "turn 6 was another one"
    place, _ = parted(tokenizer, chat(LONG, *turns), chat(LONG, *changed))
    assert place.message_index == 7 and place.role == "user"
    assert "turn 6" in place.before and "of the conv" in place.yours and "was another" in place.cached


def test_dropped_thoughts_are_told(tokenizer: Any) -> None:
    place, cause = parted(
        tokenizer,
        chat(LONG, "Sum?", "Four.", "Sure?"),
        chat(LONG, "Sum?", "<think>two and two</think>Four.", "Sure?"),
    )
    assert cause == "reasoning_dropped" and place.message_index == 2


def test_tools_in_another_order_are_told(tokenizer: Any) -> None:
    first, second = '{"name": "get_weather"}', '{"name": "send_mail"}'
    _, cause = parted(tokenizer, chat(f"{LONG}{first}{second}", "Hi?"), chat(f"{LONG}{second}{first}", "Hi?"))
    assert cause == "tool_order"
