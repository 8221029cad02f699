"""Log-probabilities: true bytes, the API's two shapes, and none for text that isn't there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from gateway.engine.types import TokenLogprobs
from gateway.prompt.token_bytes import TokenBytes, byte_characters
from gateway.protocol.logprobs import CompletionLogprobs, LogprobAligner

from .scripted import Running, data_lines

HI = [{"role": "user", "content": "hi"}]


def test_bytes_of_a_byte_level_vocabulary(tokenizer: Any) -> None:
    token_bytes = TokenBytes(tokenizer)
    for text in ("Hello wörld", " 🫠 龜 한국어\n\t", "x" * 40):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(token_bytes.of, ids)) == text.encode()
    assert any(b"\xf0" in token_bytes.of(i) for i in tokenizer.encode("🫠")), "a part of a character stays bytes"
    assert token_bytes.of(2) == b"<|im_end|>" and token_bytes.of(10**6) == b""
    assert len(set(byte_characters().values())) == 256


def test_bytes_of_a_sentencepiece_vocabulary() -> None:
    vocab = {"<unk>": 0, "▁Hi": 1, "<0xF0>": 2, "▁": 3, "a": 4}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    token_bytes = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    assert [token_bytes.of(i) for i in (1, 2, 3, 4)] == [b" Hi", b"\xf0", b" ", b"a"]


PARTS = {1: b"a", 2: b"\xf0\x9f", 3: b"\xab\xa0", 4: b"bc", 5: b"END"}


def entry(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0)


def test_entries_wait_for_their_text_and_go_with_it() -> None:
    aligner = LogprobAligner(PARTS.__getitem__)
    assert [e.token_id for e in aligner.add([entry(1)], "a")] == [1]
    assert aligner.add([entry(2)], "") == ()
    assert [e.token_id for e in aligner.add([entry(3)], "🫠")] == [2, 3]
    assert [e.token_id for e in aligner.add([entry(4)], "b")] == [4], "its first byte is out"
    assert aligner.add([entry(5)], "c") == ()
    assert aligner.rest(cut=True) == () == aligner.rest(cut=False)


def test_a_cut_character_at_the_end_keeps_its_entry() -> None:
    aligner = LogprobAligner(PARTS.__getitem__)
    aligner.add([entry(2)], "")
    assert [e.token_id for e in aligner.rest(cut=False)] == [2]


def test_completion_shape_names_bytes_and_counts_characters() -> None:
    writer = CompletionLogprobs(PARTS.__getitem__, offset=10)
    first = writer.piece([TokenLogprobs(1, -0.5, ((1, -0.5), (4, -2.0)))], top=True)
    assert first == {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.5, "bc": -2.0}],
        "text_offset": [10],
    }
    second = writer.piece([entry(2), entry(3), TokenLogprobs(4, float("-inf"))], top=False)
    assert second["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\xab\\xa0", "bc"]
    assert second["text_offset"] == [11, 12, 12] and second["top_logprobs"] is None
    assert second["token_logprobs"][-1] == -9999.0, "JSON has no infinity"


@pytest.fixture
def spelled(server: Running) -> Running:
    """Answers with the demo tokenizer's own pieces of a text whose last character two or more tokens share."""
    tokenizer = server.engine.tokenizer
    server.engine.tokens = tokenizer.encode("ok 🫠", add_special_tokens=False)
    server.engine.reply = ["ok", *[""] * (len(server.engine.tokens) - 2), " 🫠"]
    return server


def test_chat_logprobs_whole_and_streamed(spelled: Running) -> None:
    whole = spelled.client.chat.completions.create(model="demo", messages=HI, logprobs=True, top_logprobs=2)
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    content = whole.choices[0].logprobs.content
    assert b"".join(bytes(t.bytes or []) for t in content).decode() == whole.choices[0].message.content == "ok 🫠"
    assert len(content) == len(spelled.engine.tokens)
    assert all(t.logprob == -0.5 and [a.logprob for a in t.top_logprobs] == [-1.0, -2.0] for t in content)
    assert content[0].token == "ok" and spelled.engine.requests[-1].sampling.logprobs == 2

    stream = spelled.client.chat.completions.create(
        model="demo", messages=HI, logprobs=True, top_logprobs=2, stream=True
    )
    sent = []
    for chunk in stream:
        if (logprobs := chunk.choices[0].logprobs) is not None:
            sent += logprobs.content or []
    assert sent == content

    bare = spelled.client.chat.completions.create(model="demo", messages=HI, logprobs=True)
    assert bare.choices[0].logprobs is not None and bare.choices[0].logprobs.content is not None
    assert bare.choices[0].logprobs.content[0].top_logprobs == []
    assert spelled.chat().json()["choices"][0]["logprobs"] is None


def test_completion_logprobs_whole_and_streamed(spelled: Running) -> None:
    def ask(**fields: Any) -> Any:
        return spelled.http.post("/v1/completions", json={"model": "demo", "prompt": "x", **fields})

    logprobs = ask(logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][0] == "ok" and logprobs["text_offset"][:2] == [0, 2]
    assert len(logprobs["top_logprobs"][0]) == 2, "the alternative, and the chosen token"
    streamed: dict[str, list[Any]] = {key: [] for key in logprobs}
    for line in data_lines(ask(logprobs=1, stream=True))[:-1]:
        for key, values in json.loads(line)["choices"][0]["logprobs"].items():
            streamed[key] += values
    assert streamed == logprobs
    assert ask(logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] is None
    assert ask().json()["choices"][0]["logprobs"] is None


def test_log_probabilities_of_a_prompt_are_refused(server: Running) -> None:
    body = {"model": "demo", "prompt": "x", "echo": True, "logprobs": 1}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "logprobs"
    response = server.chat(top_logprobs=3)
    assert response.status_code == 400 and response.json()["error"]["param"] == "top_logprobs"
