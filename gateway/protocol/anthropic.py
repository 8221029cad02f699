"""Anthropic's Messages API: its bodies as chat completion bodies.

Source: Anthropic's API reference, version 2023-06-01.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from gateway.protocol.anthropic_content import Breakpoint, chat_messages, last_breakpoint, text_of
from gateway.protocol.errors import InvalidRequest, UnsupportedParameter, validated
from gateway.protocol.messages import Body, Int

#: Fields that mean the same in a chat body; the last ones are this server's own.
_SAME = (
    "model stream temperature top_p top_k min_p seed repetition_penalty presence_penalty frequency_penalty logit_bias "
    "ignore_eos cache_salt prompt_cache_retention chat_template_kwargs"
).split()

_REFUSED = {
    "container": "leave it out; code runs on the client's side",
    "mcp_servers": "connect to them in the client and send their tools as tools",
    "context_management": "leave it out and send the messages you want to keep",
}


class CountRequest(Body):
    """What ``count_tokens`` takes, checked as far as the chat body doesn't."""

    messages: Annotated[list[Any], Field(min_length=1)]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    max_tokens: Annotated[Int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None


def chat_body(body: Mapping[str, Any], *, counting: bool = False) -> dict[str, Any]:
    """The chat completion body that asks for the same.

    Args:
        body: of ``/v1/messages``.
        counting: it is one of ``count_tokens``, without max_tokens.

    Raises:
        InvalidRequest: malformed, or asks for what this server doesn't have.
    """
    for param, remedy in _REFUSED.items():
        if body.get(param):
            raise UnsupportedParameter(param, remedy)
    asked = validated(CountRequest if counting else MessagesRequest, body)
    messages = chat_messages(asked.messages)
    if asked.system:
        messages.insert(0, {"role": "system", "content": text_of(asked.system, "system")})
    chat = {key: body[key] for key in _SAME if body.get(key) is not None}
    chat |= {"messages": messages, **_tools(asked), **_format(asked), **_thinking(asked, chat)}
    if isinstance(asked, MessagesRequest):
        chat |= {"max_tokens": asked.max_tokens, "stop": asked.stop_sequences}
    # An assistant turn at the end is the beginning of the answer.
    if messages[-1]["role"] == "assistant" and messages[-1].get("content") and not messages[-1].get("tool_calls"):
        chat["continue_final_message"] = True
    return chat


def up_to_breakpoint(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The chat body that ends with the last block marked by ``cache_control``; None = nothing that can be rendered."""
    marked: Breakpoint | None = last_breakpoint(body)
    if marked is None:
        return None
    kept = {**body, "system": marked.system, "messages": marked.messages or [{"role": "user", "content": ""}]}
    chat = chat_body(kept, counting=True)
    if not marked.messages:
        chat["messages"].pop()
    chat.pop("continue_final_message", None)
    return {**chat, "add_generation_prompt": False} if chat["messages"] else None


def _tools(asked: CountRequest) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if asked.tools:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools)]
    choice = asked.tool_choice
    if choice is None:
        return chat
    if choice.get("disable_parallel_tool_use") is not None:
        chat["parallel_tool_calls"] = choice["disable_parallel_tool_use"] is not True
    match choice:
        case {"type": "auto" | "none" as kind}:
            chat["tool_choice"] = kind
        case {"type": "any"}:
            chat["tool_choice"] = "required"
        case {"type": "tool", "name": str(name)}:
            chat["tool_choice"] = {"type": "function", "function": {"name": name}}
        case _:
            raise InvalidRequest(
                'tool_choice must be {"type": "auto"}, {"type": "any"}, {"type": "none"} or '
                '{"type": "tool", "name": "..."}',
                "tool_choice",
            )
    return chat


def _tool(tool: Any, param: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"{param} must be an object with name and input_schema", param)
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"{param}: {str(tool['type'])[:40]!r} runs on Anthropic's servers; offer a tool of your own with name and "
            "input_schema",
            param,
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _format(asked: CountRequest) -> dict[str, Any]:
    wanted = asked.output_format or (asked.output_config or {}).get("format")
    if not wanted:
        return {}
    if not isinstance(wanted, Mapping) or wanted.get("type") != "json_schema":
        raise InvalidRequest('output_config.format must be {"type": "json_schema", "schema": {...}}', "output_config")
    schema = {"name": "output", "schema": wanted.get("schema")}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _thinking(asked: CountRequest, chat: Mapping[str, Any]) -> dict[str, Any]:
    """Templates of models that can think or not have a switch for it, most under this name."""
    kind = (asked.thinking or {}).get("type")
    if kind not in ("enabled", "disabled"):
        return {}
    own = chat.get("chat_template_kwargs")
    return {"chat_template_kwargs": {"enable_thinking": kind == "enabled", **(own if isinstance(own, dict) else {})}}
