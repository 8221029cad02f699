"""The Responses API's body as a chat completion body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from gateway.protocol.errors import InvalidRequest, UnsupportedParameter, validated
from gateway.protocol.messages import Body, Int
from gateway.protocol.response_items import chat_messages

#: Fields that mean the same in a chat body; most are this server's own.
_SAME = (
    "model stream temperature top_p top_k min_p seed stop repetition_penalty presence_penalty frequency_penalty "
    "logit_bias ignore_eos cache_salt prompt_cache_retention chat_template_kwargs parallel_tool_calls"
).split()

_REFUSED = {
    "background": "leave it out; answers are made while you wait",
    "conversation": "use previous_response_id, or send the whole conversation as input",
    "prompt": "send the text as instructions and input",
    "context_management": "leave it out and send what the model should see",
}

LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(Body):
    """Checked as far as the chat body doesn't."""

    model: str | None = None
    input: str | list[Any] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @model_validator(mode="after")
    def _has_input(self) -> Self:
        if self.input is None or self.input == []:
            raise ValueError("input is required: send a string or a list of items")
        return self

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ResponsesRequest:
        """Raises InvalidRequest."""
        for param, remedy in _REFUSED.items():
            if body.get(param):
                raise UnsupportedParameter(param, remedy)
        return validated(cls, body)


def chat_body(asked: ResponsesRequest, body: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The chat completion body that asks for the same.

    Args:
        asked: the checked body.
        body: as it came.
        history: messages of the earlier response, which ``input`` follows.

    Raises:
        InvalidRequest: malformed items, tools or format.
    """
    messages = [*history, *chat_messages(asked.input or "")]
    if asked.instructions:
        messages.insert(0, {"role": "system", "content": asked.instructions})
    chat: dict[str, Any] = {key: body[key] for key in _SAME if body.get(key) is not None}
    chat |= {"messages": messages, "max_completion_tokens": asked.max_output_tokens}
    if asked.tools:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools)]
    if asked.tool_choice is not None:
        chat["tool_choice"] = asked.tool_choice
    if LOGPROBS in (asked.include or []) or asked.top_logprobs:
        chat |= {"logprobs": True, "top_logprobs": asked.top_logprobs}
    return {**chat, **_format(asked.text), **_effort(asked.reasoning, chat.get("chat_template_kwargs"))}


def _tool(tool: Any, param: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = str(tool.get("type"))[:40] if isinstance(tool, Mapping) else type(tool).__name__
        raise InvalidRequest(
            f"{param}: tools of type {kind!r} are not supported here; offer functions of your own: "
            '{"type": "function", "name": "...", "parameters": {...}}',
            param,
        )
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _format(text: Mapping[str, Any] | None) -> dict[str, Any]:
    wanted = (text or {}).get("format")
    if wanted is None:
        return {}
    if not isinstance(wanted, Mapping):
        raise InvalidRequest('text.format must be an object such as {"type": "json_schema", ...}', "text.format")
    if wanted.get("type") != "json_schema":
        return {"response_format": dict(wanted)}
    described = {key: wanted[key] for key in ("name", "schema", "strict") if key in wanted}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def _effort(reasoning: Mapping[str, Any] | None, own: Any) -> dict[str, Any]:
    """Templates of thinking models have a switch or a level for it, under these names."""
    effort = (reasoning or {}).get("effort")
    if not isinstance(effort, str):
        return {}
    switch = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    return {"chat_template_kwargs": {**switch, **(own if isinstance(own, dict) else {})}}
