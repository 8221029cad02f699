"""``/tokenize``, ``/detokenize`` in vLLM's shapes, and ``/v1/embeddings`` forwarded."""

from __future__ import annotations

from typing import Any

import pytest

from .fake_upstream import FakeUpstream, answer
from .scripted import Running, serving

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("root", ["", "/v1"])
def test_a_text_there_and_back(server: Running, root: str) -> None:
    text = "Grüße, 🫠 龜!"
    there = server.http.post(f"{root}/tokenize", json={"model": "demo", "prompt": text}).json()
    assert there["count"] == len(there["tokens"]) > 3 and there["max_model_len"] == 128
    assert there["token_strs"] is None
    back = server.http.post(f"{root}/detokenize", json={"model": "demo", "tokens": there["tokens"]}).json()
    assert back == {"prompt": text}


def test_a_chat_is_tokenised_as_it_is_served(server: Running) -> None:
    chat = server.http.post("/tokenize", json={"messages": HI, "return_token_strs": True}).json()
    server.chat()
    assert chat["tokens"] == server.engine.requests[0].prompt_ids
    assert len(chat["token_strs"]) == chat["count"] and "<|im_start|>" in chat["token_strs"]
    open_end = server.http.post("/tokenize", json={"messages": HI, "add_generation_prompt": False}).json()
    assert open_end["tokens"] == chat["tokens"][: open_end["count"]] and open_end["count"] < chat["count"]


def test_without_special_tokens(server: Running) -> None:
    bare = server.http.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False}).json()
    assert bare["count"] == 1
    assert server.http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        ("tokenize", {}, None, 400), ("tokenize", {"prompt": 5}, "prompt", 400), ("tokenize", {"messages": []}, "messages", 400),
        ("tokenize", {"prompt": "x", "model": "other"}, "model", 404), ("tokenize", {"prompt": "x", "model": 5}, "model", 404),
        ("detokenize", {}, "tokens", 400), ("detokenize", {"tokens": [49152]}, "tokens", 400),
        ("detokenize", {"tokens": [-1]}, "tokens", 400), ("detokenize", {"tokens": ["a"]}, "tokens[0]", 400),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(server: Running, path: str, body: Any, param: str | None, status: int) -> None:
    response = server.http.post(f"/{path}", json=body)
    assert response.status_code == status and response.json()["error"]["param"] == param


def test_the_local_model_makes_no_embeddings(server: Running) -> None:
    for body in ({"input": "x"}, {"model": "demo", "input": "x"}):
        error = server.http.post("/v1/embeddings", json=body)
        assert error.status_code == 400 and "api_base" in error.json()["error"]["message"]
    assert server.http.post("/v1/embeddings", json={"model": "other", "input": "x"}).status_code == 404


def test_embeddings_are_forwarded(tokenizer: Any) -> None:
    made = {
        "object": "list", "model": "far", "usage": {"prompt_tokens": 1, "total_tokens": 1},
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}],
    }  # fmt: skip
    with (
        FakeUpstream(lambda _: answer(made)) as upstream,
        serving(tokenizer, server={"api_base": upstream.base}) as server,
    ):
        found = server.client.embeddings.create(model="far", input="x", encoding_format="float")
        assert found.data[0].embedding == [0.5, -0.25]
        assert upstream.received[0].path == "/v1/embeddings"
