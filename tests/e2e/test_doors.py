"""The doors beside chat completions, the whole way on SmolLM2: Responses, Messages, tokens."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx

from .server import ServerProcess
from .texts import document

RULES = document(21, 30)
ASK: Any = [{"role": "user", "content": "What does rule 3 say?"}]


def test_one_prefix_serves_all_doors(server: ServerProcess) -> None:
    """The same system text and question are the same tokens, whichever door they come in by."""
    chat = server.client.chat.completions.create(
        model="demo", messages=[{"role": "system", "content": RULES}, *ASK], max_tokens=12, temperature=0
    )
    assert chat.usage is not None
    prompt, text = chat.usage.prompt_tokens, chat.choices[0].message.content

    made = server.client.responses.create(
        model="demo", instructions=RULES, input=ASK, max_output_tokens=12, temperature=0
    )
    assert made.output_text == text and made.usage is not None
    assert made.usage.input_tokens == prompt and made.usage.input_tokens_details.cached_tokens == prompt - 1

    client = anthropic.Anthropic(base_url=server.root, api_key="none", max_retries=0, timeout=60)
    asked: Any = {"model": "demo", "system": RULES, "messages": ASK}
    assert client.messages.count_tokens(**asked).input_tokens == prompt
    with client.messages.stream(max_tokens=12, extra_body={"temperature": 0}, **asked) as streamed:
        message = streamed.get_final_message()
    assert message.content[0].type == "text" and message.content[0].text == text
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (1, prompt - 1)

    body = {"messages": [{"role": "system", "content": RULES}, *ASK]}
    assert httpx.post(f"{server.root}/tokenize", json=body).json()["count"] == prompt


def test_a_stop_sequence_is_named(server: ServerProcess) -> None:
    client = anthropic.Anthropic(base_url=server.root, api_key="none", max_retries=0, timeout=60)
    asked: Any = {"model": "demo", "max_tokens": 12, "messages": ASK, "extra_body": {"temperature": 0}}
    whole: Any = client.messages.create(**asked).content[0]
    stop = whole.text[5:9]
    cut = client.messages.create(stop_sequences=["never said", stop], **asked)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


def test_a_turn_goes_on_from_a_kept_response(server: ServerProcess) -> None:
    first = server.client.responses.create(model="demo", input="Name a colour.", max_output_tokens=8, temperature=0)
    second = server.client.responses.create(
        model="demo", input="Another.", previous_response_id=first.id, max_output_tokens=4, temperature=0
    )
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
