"""Bodies of ``/tokenize`` and ``/detokenize``, in vLLM's shapes. Beside ``messages`` a chat body's fields count."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from gateway.protocol.messages import Body, Int


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_prompt(self) -> Self:
        if self.prompt is None:
            raise ValueError('send a text as "prompt", or a chat as "messages"')
        return self


class ChatTokenizeOptions(Body):
    """Fields of a request with ``messages`` that the chat body doesn't have."""

    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[Int]
