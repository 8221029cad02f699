"""The parts of an answer on SmolLM2 with the official client: log-probabilities, structured output, tools, prefill."""

from __future__ import annotations

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .server import ServerProcess
from .texts import chat

SHORT = chat("You are brief.", "Repeat: 🫠 龜")


def test_log_probabilities_are_the_models_own(server: ServerProcess) -> None:
    def ask(**settings: object) -> list[tuple[bytes, float, list[float]]]:
        answer = server.client.chat.completions.create(  # type: ignore[call-overload]
            model="demo", messages=SHORT, max_tokens=12, logprobs=True, top_logprobs=5, seed=1, **settings
        )
        content = answer.choices[0].logprobs.content
        text = b"".join(bytes(t.bytes) for t in content).decode("utf-8", "ignore")
        assert text == answer.choices[0].message.content
        return [(bytes(t.bytes), t.logprob, [a.logprob for a in t.top_logprobs]) for t in content]

    greedy = ask(temperature=0)
    for _, logprob, top in greedy:
        assert logprob == top[0] == max(top) <= 0, "greedy takes the best"
        assert sum(math.exp(p) for p in top) <= 1.0001
    biased = ask(temperature=0.1, logit_bias={"5": -100}, frequency_penalty=0.001)
    assert [b[0] for b in biased[:1]] == [g[0] for g in greedy[:1]]
    assert abs(biased[0][1] - greedy[0][1]) < 1e-4, "before temperature, bias and penalties"

    plain = server.client.completions.create(
        model="demo", prompt="Once upon a", max_tokens=4, temperature=0, logprobs=2
    )
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None and "".join(logprobs.tokens or []) == plain.choices[0].text
    assert logprobs.text_offset is not None and logprobs.text_offset[0] == 0


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "size": {"enum": ["small", "large"]}, "n": {"type": "integer"}},
    "required": ["city", "size", "n"],
    "additionalProperties": False,
}  # fmt: skip


def test_answers_follow_a_schema_greedy_sampled_and_in_company(server: ServerProcess) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}

    def ask(temperature: float) -> None:
        answer = server.client.chat.completions.create(
            model="demo", messages=chat("You answer.", "Tell me about Rome."), response_format=form,  # type: ignore[arg-type]
            temperature=temperature, max_tokens=150, seed=3,
        ).choices[0]  # fmt: skip
        if answer.finish_reason == "stop":  # a number may be longer than any limit
            city = json.loads(answer.message.content or "")
            assert set(city) == {"city", "size", "n"} and city["size"] in ("small", "large")
            assert isinstance(city["n"], int) and len(city["city"]) <= 20
            ended.append(temperature)

    ended: list[float] = []
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, (0, 0.7, 1.0, 1.5)))
    assert len(ended) >= 2


def test_regex_choice_and_grammar(server: ServerProcess) -> None:
    def ask(**fields: Any) -> tuple[str, str]:
        answer = server.client.chat.completions.create(
            model="demo", messages=SHORT, temperature=1, max_tokens=40, extra_body=fields
        )
        return answer.choices[0].message.content or "", answer.choices[0].finish_reason

    for _ in range(3):
        text, reason = ask(guided_regex="[A-Z]{2}-[0-9]{4}")
        assert re.fullmatch("[A-Z]{2}-[0-9]{4}", text) and reason == "stop"
    assert ask(structured_outputs={"choice": ["positive", "negative"]})[0] in ("positive", "negative")
    assert re.fullmatch("x[0-9]+", ask(guided_grammar='root ::= "x" [0-9] [0-9]?')[0])
    free = server.client.completions.create(
        model="demo", prompt="One, two,", max_tokens=30, stream=True, extra_body={"guided_choice": ["🫠 three"]}
    )
    assert "".join(chunk.choices[0].text for chunk in free) == "🫠 three"


TOOLS: Any = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"enum": ["C", "F"]}},
                       "required": ["city", "unit"], "additionalProperties": False},
    }},
    {"type": "function", "function": {
        "name": "set_alarm", "parameters": {"type": "object", "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
                                            "required": ["hour"], "additionalProperties": False},
    }},
]  # fmt: skip
ARGUMENTS = {"get_weather": {"city", "unit"}, "set_alarm": {"hour"}}


def test_forced_calls_are_always_valid_and_their_turn_comes_back(server: ServerProcess) -> None:
    client = server.client
    messages: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    named = {"type": "function", "function": {"name": "set_alarm"}}
    for choice, temperature in (("required", 1.2), (named, 1.2), (named, 0)):
        answer = client.chat.completions.create(
            model="demo", messages=messages, tools=TOOLS, tool_choice=choice, temperature=temperature,  # type: ignore[call-overload]
            parallel_tool_calls=False, max_tokens=120,
        ).choices[0]  # fmt: skip
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        assert set(json.loads(call.function.arguments)) == ARGUMENTS[call.function.name]
        assert choice == "required" or call.function.name == "set_alarm"

    again = client.chat.completions.create(
        model="demo", tools=TOOLS, max_tokens=8,
        messages=[*messages, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}],
    )  # fmt: skip
    assert again.choices[0].message.content or again.choices[0].message.tool_calls


def test_a_streamed_call_is_the_whole_one_in_pieces(server: ServerProcess) -> None:
    fields: Any = {
        "model": "demo", "messages": [{"role": "user", "content": "Wake me at six."}], "tools": TOOLS,
        "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_tokens": 120,
    }  # fmt: skip
    (call,) = server.client.chat.completions.create(**fields).choices[0].message.tool_calls or []
    pieces = []
    for chunk in server.client.chat.completions.create(**fields, stream=True):
        pieces += chunk.choices[0].delta.tool_calls or []
    assert pieces[0].id and pieces[0].function.name == call.function.name  # type: ignore[union-attr]
    assert len(pieces) > 1 and {p.index for p in pieces} == {0}
    assert "".join(p.function.arguments for p in pieces) == call.function.arguments  # type: ignore[union-attr]


def test_a_prefilled_answer_goes_on(server: ServerProcess) -> None:
    prefill: Any = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2, 3, 4,"}]
    answer = server.client.chat.completions.create(
        model="demo", messages=prefill, max_tokens=4, temperature=0, extra_body={"continue_final_message": True}
    )
    assert (answer.choices[0].message.content or "").lstrip().startswith("5")
