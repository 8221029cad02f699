"""Input items of the Responses API as chat messages.

Source: OpenAI's API reference, Responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.protocol.errors import InvalidRequest

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def chat_messages(items: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Raises InvalidRequest."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    made: list[dict[str, Any]] = []
    thought = ""  # belongs to the assistant turn that follows
    for i, item in enumerate(items):
        param = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise InvalidRequest(f'{param} must be an item such as {{"role": "user", "content": "..."}}', param)
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought += _thought(item, param)
        elif kind == "message":
            made.append(_message(item, param, thought))
            thought = ""
        elif kind == "function_call":
            _add_call(made, _call(item, param), thought)
            thought = ""
        elif kind == "function_call_output":
            made.append(_output(item, param))
        else:
            raise InvalidRequest(
                f"{param}: items of type {str(kind)[:40]!r} are not supported here; leave it out or write a message",
                param,
            )
    return made


def text_of(content: Any, param: str) -> str:
    """A string, or text parts joined without a separator. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{param} must be a string or a list of parts", param)
    return "".join(_part(part, f"{param}[{i}]") for i, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
    if kind not in (*_TEXT_PARTS, "refusal"):
        raise InvalidRequest(
            f"{param}: parts of type {str(kind)[:40]!r} are not supported: this model takes text; leave it out", param
        )
    if not isinstance(text, str):
        raise InvalidRequest(f"{param}: the part needs its text as a string", param)
    return text


def _message(item: Mapping[str, Any], param: str, thought: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{param}.role must be one of {', '.join(_ROLES)}", f"{param}.role")
    message = {"role": role, "content": text_of(item.get("content"), f"{param}.content")}
    return {**message, "reasoning_content": thought} if thought and role == "assistant" else message


def _call(item: Mapping[str, Any], param: str) -> dict[str, Any]:
    name, arguments, call_id = (_string(item, key, param) for key in ("name", "arguments", "call_id"))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _add_call(made: list[dict[str, Any]], call: dict[str, Any], thought: str) -> None:
    """The calls of one turn, and the text before them, are one chat message."""
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": ""})
    if thought:
        made[-1]["reasoning_content"] = thought
    made[-1].setdefault("tool_calls", []).append(call)


def _output(item: Mapping[str, Any], param: str) -> dict[str, Any]:
    call_id = _string(item, "call_id", param)
    return {"role": "tool", "tool_call_id": call_id, "content": text_of(item.get("output"), f"{param}.output")}


def _thought(item: Mapping[str, Any], param: str) -> str:
    """What is readable of a reasoning item; encrypted content is for its maker only."""
    content = item.get("content") or item.get("summary") or ""
    return text_of(content, f"{param}.content")


def _string(item: Mapping[str, Any], key: str, param: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{param}.{key} must be a string", f"{param}.{key}")
    return value
