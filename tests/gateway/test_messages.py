"""``/v1/messages`` with the official client: messages, streams, tools, thoughts, counts, errors. A real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from .fake_upstream import FakeUpstream, answer, stream
from .scripted import REPLY, Running, serving

TEXT = "".join(REPLY)
HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "name": "get_weather",
    "description": "Weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture
def roomy(server: Running) -> Running:
    server.engine.max_model_len = 4096
    return server


@pytest.fixture
def client(roomy: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=roomy.root, api_key="none", max_retries=0, timeout=10) as made:
        yield made


def post(server: Running, **fields: Any) -> httpx.Response:
    return server.http.post("/v1/messages", json={"model": "demo", "max_tokens": 50, "messages": HI, **fields})


def prompt_text(server: Running) -> str:
    return str(server.engine.tokenizer.decode(server.engine.requests[-1].prompt_ids))


def test_a_whole_message(roomy: Running, client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="demo", max_tokens=50, system="Be brief.", messages=HI, stop_sequences=["END"], metadata={"user_id": "u"},
        extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9},  # newer clients don't name them any more
    )  # fmt: skip
    assert message.id.startswith("msg_") and message.type == "message" and message.role == "assistant"
    assert message.content[0].type == "text" and message.content[0].text == TEXT
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "demo")
    request = roomy.engine.requests[0]
    assert message.usage.input_tokens == len(request.prompt_ids) and message.usage.output_tokens == len(REPLY)
    assert message.usage.cache_read_input_tokens == message.usage.cache_creation_input_tokens == 0
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (50, 0.5, 5, 0.9)
    assert sampling.stop == ("END",) and "system\nBe brief." in prompt_text(roomy)


def test_cached_tokens_are_counted_apart(roomy: Running, client: anthropic.Anthropic) -> None:
    for _ in range(2):
        message = client.messages.create(model="demo", max_tokens=5, messages=HI)
    prompt = len(roomy.engine.requests[0].prompt_ids)
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (1, prompt - 1)


def test_cache_control_says_what_is_written(roomy: Running, client: anthropic.Anthropic) -> None:
    marked: Any = [{"type": "text", "text": "Long rules. " * 20, "cache_control": {"type": "ephemeral"}}]
    usage = client.messages.create(model="demo", max_tokens=5, system=marked, messages=HI).usage
    prompt = len(roomy.engine.requests[0].prompt_ids)
    assert usage.cache_creation_input_tokens is not None and usage.cache_read_input_tokens == 0
    assert usage.input_tokens + usage.cache_creation_input_tokens == prompt
    assert 0 < usage.input_tokens < 20 and usage.cache_creation_input_tokens > 60
    again = client.messages.create(model="demo", max_tokens=5, system=marked, messages=HI).usage
    assert (again.cache_creation_input_tokens, again.cache_read_input_tokens) == (0, prompt - 1)
    turn: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {**marked[0]}, {"type": "text", "text": "z"}]}
    ]
    usage = client.messages.create(model="demo", max_tokens=5, messages=turn).usage
    assert 0 < usage.input_tokens < 20


def test_a_stream_has_every_event(roomy: Running, client: anthropic.Anthropic) -> None:
    raw = post(roomy, stream=True)
    assert raw.headers["content-type"].startswith("text/event-stream") and raw.headers["x-prefix-cache"]
    names = [line[7:] for line in raw.text.split("\n") if line.startswith("event: ")]
    events = [json.loads(line[6:]) for line in raw.text.split("\n") if line.startswith("data: ")]
    assert names == [made["type"] for made in events], "no [DONE], and each event is named"
    assert [name for name in names if name not in ("ping", "content_block_delta")] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["usage"]["input_tokens"] > 0 and events[0]["message"]["content"] == []
    with client.messages.stream(model="demo", max_tokens=50, messages=HI) as streamed:
        assert "".join(streamed.text_stream) == TEXT
        final = streamed.get_final_message()
    assert final.content[0].type == "text" and final.content[0].text == TEXT and final.stop_reason == "end_turn"
    assert final.usage.output_tokens == len(REPLY)


@pytest.mark.parametrize("streams", [False, True])
def test_why_it_stopped(roomy: Running, client: anthropic.Anthropic, streams: bool) -> None:
    def ask(**fields: Any) -> tuple[str | None, str | None]:
        asked: Any = {"model": "demo", "max_tokens": 50, "messages": HI, **fields}
        if not streams:
            message = client.messages.create(**asked)
        else:
            with client.messages.stream(**asked) as streamed:
                message = streamed.get_final_message()
        return message.stop_reason, message.stop_sequence

    assert ask() == ("end_turn", None)
    assert ask(max_tokens=2) == ("max_tokens", None)
    roomy.engine.stop_string = "END"
    assert ask(stop_sequences=["END"]) == ("stop_sequence", "END")


@pytest.mark.parametrize("streams", [False, True])
def test_tools_are_called_and_their_results_taken_back(
    roomy: Running, client: anthropic.Anthropic, streams: bool
) -> None:
    roomy.engine.reply = ("Let me see.", CALL[:10], CALL[10:40], CALL[40:])
    asked: Any = {"model": "demo", "max_tokens": 50, "messages": HI, "tools": [TOOL], "tool_choice": {"type": "auto"}}
    if streams:
        with client.messages.stream(**asked) as streamed:
            message = streamed.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert "get_weather" in prompt_text(roomy)
    text, call = message.content
    assert text.type == "text" and text.text.startswith("Let me see.") and message.stop_reason == "tool_use"
    assert call.type == "tool_use" and call.name == "get_weather" and call.input == {"city": "Köln"} and call.id

    roomy.engine.reply = REPLY
    history: Any = [
        *HI,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "12 degrees"}]},
            {"type": "text", "text": "And "}, {"type": "text", "text": "now?"},
        ]},
    ]  # fmt: skip
    client.messages.create(model="demo", max_tokens=50, messages=history, tools=[TOOL])
    prompt = prompt_text(roomy)
    assert prompt.index("Köln") < prompt.index("12 degrees") < prompt.index("And now?")


def test_choices_of_tools(roomy: Running, client: anthropic.Anthropic) -> None:
    roomy.engine.reply = (CALL, CALL)
    choices: Any = [{"type": "any"}, {"type": "tool", "name": "get_weather"}]
    for choice in choices:
        client.messages.create(model="demo", max_tokens=50, messages=HI, tools=[TOOL], tool_choice=choice)
        assert roomy.engine.requests[-1].grammar is not None
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    message = client.messages.create(model="demo", max_tokens=50, messages=HI, tools=[TOOL], tool_choice=one)
    assert len([block for block in message.content if block.type == "tool_use"]) == 1
    none: Any = {"type": "none"}
    client.messages.create(model="demo", max_tokens=50, messages=HI, tools=[TOOL], tool_choice=none)
    assert "get_weather" not in prompt_text(roomy)


def test_thoughts_have_a_block_of_their_own(tokenizer: Any) -> None:
    with serving(tokenizer, model={"reasoning_parser": "think"}) as server:
        server.engine.reply = ("<think>", "hm", "</think>", "yes")
        with anthropic.Anthropic(base_url=server.root, api_key="none", max_retries=0) as client:
            message = client.messages.create(model="demo", max_tokens=50, messages=HI)
            with client.messages.stream(model="demo", max_tokens=50, messages=HI) as streamed:
                final = streamed.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text"]
        thought, text = message.content
        assert thought.type == "thinking" and thought.thinking == "hm"
        assert text.type == "text" and text.text == "yes"
        history = [*HI, {"role": "assistant", "content": [thought.model_dump(), text.model_dump()]}, *HI]
        assert post(server, messages=history).status_code == 200


def test_the_last_assistant_turn_is_gone_on_with(roomy: Running) -> None:
    assert post(roomy, messages=[*HI, {"role": "assistant", "content": "Well, I"}]).status_code == 200
    assert prompt_text(roomy).endswith("Well, I")


def test_tokens_are_counted_as_they_are_served(roomy: Running, client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "demo", "system": "Be brief.", "messages": HI, "tools": [TOOL]}
    counted = client.messages.count_tokens(**asked)
    client.messages.create(max_tokens=5, **asked)
    assert counted.input_tokens == len(roomy.engine.requests[0].prompt_ids)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": None}, "max_tokens"), ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"), ({"messages": [5]}, "messages[0]"), ({"system": 5}, "system"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]}, "input"),
        ({"system": [{"type": "text", "text": 5}]}, "system[0]"), ({"temperature": 3}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences"), ({"tool_choice": {"type": "no"}}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "no name"}]}, "tools[0]"), ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"), ({"tools": 5}, "tools"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_in_anthropics_envelope(roomy: Running, fields: dict[str, Any], word: str) -> None:
    response = post(roomy, **fields)
    body = response.json()
    assert response.status_code == 400, body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert word in body["error"]["message"] and body["request_id"] == response.headers["x-request-id"]
    assert not roomy.engine.requests


def test_the_client_understands_the_errors(roomy: Running, client: anthropic.Anthropic, tokenizer: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="no-such", max_tokens=5, messages=HI)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(model="demo", max_tokens=5, messages=[{"role": "user", "content": "word " * 5000}])
    with serving(tokenizer, server={"api_key": "right"}) as keyed:
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=keyed.root, api_key="wrong", max_retries=0).messages.create(
                model="demo", max_tokens=5, messages=HI
            )
        right = anthropic.Anthropic(base_url=keyed.root, api_key="right", max_retries=0)
        assert right.messages.create(model="demo", max_tokens=50, messages=HI).content
    assert roomy.http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"


def test_a_failure_in_the_middle_is_an_event(roomy: Running, client: anthropic.Anthropic) -> None:
    roomy.engine.fail_after = 2
    last = json.loads(data_lines_of_events(post(roomy, stream=True))[-1])
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    with (
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(model="demo", max_tokens=50, messages=HI) as streamed,
    ):
        streamed.get_final_message()
    assert post(roomy).json()["error"]["type"] == "api_error"


def data_lines_of_events(response: httpx.Response) -> list[str]:
    return [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]


def test_a_structure_is_asked_for(roomy: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert post(roomy, output_config={"format": {"type": "json_schema", "schema": schema}}).status_code == 200
    assert roomy.engine.requests[-1].grammar is not None


def test_other_models_are_forwarded_in_this_shape(tokenizer: Any) -> None:
    def script(received: Any) -> Any:
        assert received.path == "/v1/messages" and received.headers["anthropic-version"]
        if b'"stream":true' in received.body.replace(b" ", b""):
            return stream(
                b'event: message_start\ndata: {"type":"message_start"}\n\n',
                b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
            )
        return answer(
            {
                "type": "message",
                "content": [],
                "usage": {"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": 4},
            }
        )

    with FakeUpstream(script) as upstream, serving(tokenizer, server={"api_base": upstream.base}) as server:
        assert post(server, model="far").json()["usage"]["input_tokens"] == 3
        assert server.metric('kvgate_upstream_tokens_total{kind="prompt"}') == 7
        assert "[DONE]" not in post(server, model="far", stream=True).text
        upstream.script = lambda _: answer({"error": {"message": "slow down"}}, 429, retry_after="7")
        refused = post(server, model="far")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "7"
        assert refused.json()["error"] == {"type": "rate_limit_error", "message": "slow down"}
