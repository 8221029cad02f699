"""``/v1/responses`` with the official client: whole, streamed, gone on from, kept, errors. A real server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from gateway.api.kept import Kept, KeptResponses

from .scripted import REPLY, Running, serving

TEXT = "".join(REPLY)
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture
def roomy(server: Running) -> Running:
    server.engine.max_model_len = 4096
    return server


def post(server: Running, **fields: Any) -> httpx.Response:
    return server.http.post("/v1/responses", json={"model": "demo", "input": "hi", **fields})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]


def prompt_text(server: Running) -> str:
    return str(server.engine.tokenizer.decode(server.engine.requests[-1].prompt_ids))


def test_a_whole_response(roomy: Running) -> None:
    made = roomy.client.responses.create(
        model="demo", input="hi", instructions="Be brief.", max_output_tokens=50, temperature=0.5, metadata={"a": "b"}
    )
    assert made.id.startswith("resp_") and made.status == "completed" and made.output_text == TEXT
    assert made.instructions == "Be brief." and made.metadata == {"a": "b"} and made.temperature == 0.5
    assert made.usage is not None and made.usage.output_tokens == len(REPLY)
    assert made.usage.input_tokens == len(roomy.engine.requests[0].prompt_ids)
    assert made.usage.input_tokens_details.cached_tokens == 0
    assert roomy.engine.requests[0].sampling.max_tokens == 50 and "system\nBe brief." in prompt_text(roomy)
    again = roomy.client.responses.create(model="demo", input="hi", instructions="Be brief.")
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens == made.usage.input_tokens - 1


def test_a_stream_has_every_event_in_order(roomy: Running) -> None:
    raw = post(roomy, stream=True)
    events = events_of(raw)
    assert [made["sequence_number"] for made in events] == list(range(len(events)))
    names = [line[7:] for line in raw.text.split("\n") if line.startswith("event: ")]
    assert names == [made["type"] for made in events] and "[DONE]" not in raw.text
    assert [name for name in names if name != "response.output_text.delta"] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert "".join(made["delta"] for made in events if made["type"].endswith("text.delta")) == TEXT
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    last = events[-1]["response"]
    assert last["status"] == "completed" and last["output"][0]["content"][0]["text"] == TEXT
    assert last["usage"]["output_tokens"] == len(REPLY)
    with roomy.client.responses.stream(model="demo", input="hi") as streamed:
        for _ in streamed:
            pass
        assert streamed.get_final_response().output_text == TEXT


def test_cut_at_the_limit_is_incomplete(roomy: Running) -> None:
    made = roomy.client.responses.create(model="demo", input="hi", max_output_tokens=2)
    assert made.status == "incomplete" and made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert events_of(post(roomy, max_output_tokens=2, stream=True))[-1]["type"] == "response.incomplete"


def test_items_of_every_kind(roomy: Running) -> None:
    items: Any = [
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "It is "}, {"type": "input_text", "text": "where?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Köln"}'},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": '{"city": "Bonn"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "12 degrees"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "13 degrees"}]},
    ]  # fmt: skip
    roomy.client.responses.create(model="demo", input=items, tools=[TOOL])
    prompt = prompt_text(roomy)
    places = [
        prompt.index(word) for word in ("Rules.", "It is where?", "I look.", "Köln", "Bonn", "12 degrees", "13 degrees")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("streams", [False, True])
def test_tools_are_called_and_gone_on_from(roomy: Running, streams: bool) -> None:
    roomy.engine.reply = ("Let me see.", CALL[:10], CALL[10:40], CALL[40:])
    asked: Any = {"model": "demo", "input": "Weather?", "tools": [TOOL]}
    if streams:
        with roomy.client.responses.stream(**asked) as streamed:
            made: Any = [*streamed] and streamed.get_final_response()
    else:
        made = roomy.client.responses.create(**asked)
    text, call = made.output
    assert made.output_text.startswith("Let me see.") and text.type == "message"
    assert (
        call.type == "function_call" and call.name == "get_weather" and json.loads(call.arguments) == {"city": "Köln"}
    )
    roomy.engine.reply = REPLY
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}]
    roomy.client.responses.create(model="demo", input=result, tools=[TOOL], previous_response_id=made.id)
    prompt = prompt_text(roomy)
    assert prompt.index("Weather?") < prompt.index("Let me see.") < prompt.index("Köln") < prompt.index("12 degrees")
    forced: Any = {"type": "function", "name": "get_weather"}
    roomy.engine.reply = (CALL,)
    roomy.client.responses.create(model="demo", input="x", tools=[TOOL], tool_choice=forced)
    assert roomy.engine.requests[-1].grammar is not None


def test_thoughts_are_items(tokenizer: Any) -> None:
    with serving(tokenizer, model={"reasoning_parser": "think"}) as server:
        server.engine.reply = ("<think>", "hm", "</think>", "yes")
        for made in (post(server).json(), events_of(post(server, stream=True))[-1]["response"]):
            assert [item["type"] for item in made["output"]] == ["reasoning", "message"]
            assert made["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
            assert made["output"][1]["content"][0]["text"] == "yes"
            assert post(server, input=[*made["output"], {"role": "user", "content": "x"}]).status_code == 200


def test_log_probabilities(roomy: Running) -> None:
    fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = post(roomy, **fields).json()["output"][0]["content"][0]["logprobs"]
    streamed = events_of(post(roomy, stream=True, **fields))
    assert len(whole) >= 1 and len(whole[0]["top_logprobs"]) == 2
    assert [entry for made in streamed if made["type"].endswith("text.delta") for entry in made["logprobs"]] == whole


def test_a_structure_is_asked_for(roomy: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    assert post(roomy, text=text).status_code == 200 and roomy.engine.requests[-1].grammar is not None
    assert post(roomy, text={"format": {"type": "text"}}).status_code == 200


# Kept ones


def test_a_conversation_goes_on(roomy: Running) -> None:
    client = roomy.client
    first = client.responses.create(model="demo", input="My name is Ada.", instructions="Old rule.")
    second = client.responses.create(model="demo", input="And yours?", previous_response_id=first.id)
    prompt = prompt_text(roomy)
    assert prompt.index("Ada") < prompt.index(TEXT) < prompt.index("And yours?") and "Old rule." not in prompt
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)
    assert client.responses.create(model="demo", input="?", previous_response_id=second.id).id, "its history is its own"
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(model="demo", input="?", previous_response_id=first.id)
    assert gone.value.code == "previous_response_not_found" and gone.value.param == "previous_response_id"


def test_kept_ones_are_read_and_deleted(roomy: Running) -> None:
    client = roomy.client
    made = client.responses.create(model="demo", input="hi")
    assert client.responses.retrieve(made.id).output_text == TEXT
    listed: Any = client.responses.input_items.list(made.id).data
    assert listed[0].content == "hi"
    client.responses.delete(made.id)
    for missing in (made.id, "resp_none", "x" * 500):
        for method in ("GET", "DELETE"):
            assert roomy.http.request(method, f"/v1/responses/{missing}").status_code == 404
    unkept = client.responses.create(model="demo", input="hi", store=False)
    assert roomy.http.get(f"/v1/responses/{unkept.id}").status_code == 404


def test_other_tenants_find_nothing(tokenizer: Any) -> None:
    with serving(tokenizer, prefix_cache={"namespace": "per_key"}) as server:
        mine, other = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
        made = httpx.post(f"{server.url}/responses", json={"input": "hi"}, headers=mine).json()
        assert httpx.get(f"{server.url}/responses/{made['id']}", headers=mine).status_code == 200
        assert httpx.get(f"{server.url}/responses/{made['id']}", headers=other).status_code == 404
        follow = {"input": "x", "previous_response_id": made["id"]}
        assert httpx.post(f"{server.url}/responses", json=follow, headers=other).status_code == 400


def kept(name: str, text: str = "") -> Kept:
    return Kept({"id": name, "text": text}, [], [])


def test_what_is_kept_is_bounded_in_number_time_and_size() -> None:
    now = 0.0
    store = KeptResponses(2, 1000, 10, clock=lambda: now)
    for name in "abc":
        store.put("one", kept(name))
    store.put("two", kept("a"))
    assert [store.get("one", name) is not None for name in "abc"] == [False, True, True]
    assert store.get("two", "a") is not None, "each namespace has its own bound"
    now = 9.0
    store.put("two", kept("late"))
    now = 10.0
    assert store.get("one", "c") is None and store.get("two", "late") is not None
    store.put("one", kept("long", "x" * 900))
    assert store.get("one", "long") is not None
    store.put("one", kept("longer", "x" * 950))
    assert store.get("one", "long") is None and store.get("one", "longer") is not None
    store.put("one", kept("too long", "x" * 1000))
    assert store.get("one", "too long") is None
    assert not store.delete("one", "too long")


# Refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, None), ({"input": []}, None), ({"input": 5}, "input.str"), ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "no", "content": "x"}]}, "input[0].role"), ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "f"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"), ({"tools": ["x"]}, "tools[0]"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"), ({"text": {"format": 5}}, "text.format"),
        ({"background": True}, "background"), ({"conversation": "c"}, "conversation"), ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"), ({"truncation": "some"}, "truncation"),
        ({"store": "yes"}, "store"), ({"input": "word " * 5000}, "input"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(roomy: Running, fields: dict[str, Any], param: str | None) -> None:
    response = post(roomy, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert not roomy.engine.requests


def test_a_failure_in_the_middle_is_an_event(roomy: Running) -> None:
    roomy.engine.fail_after = 2
    events = events_of(post(roomy, stream=True))
    last = events[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "engine_error" and last["sequence_number"] == len(events) - 1
    assert roomy.http.get(f"/v1/responses/{last['response']['id']}").status_code == 404
    assert post(roomy).status_code == 500
