"""Content blocks of Anthropic's messages, as chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """What stands before and in the last block with ``cache_control``."""

    system: Any
    messages: list[Any]


def chat_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Raises InvalidRequest."""
    made: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        param = f"messages[{i}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise InvalidRequest(f'{param}.role must be "user" or "assistant"', f"{param}.role")
        content, place = message.get("content"), f"{param}.content"
        if isinstance(content, str):
            made.append({"role": role, "content": content})
        elif role == "assistant":
            made.append(_assistant(blocks_of(content, place), place))
        else:
            made += _user(role, blocks_of(content, place), place)
    return made


def text_of(content: Any, param: str) -> str:
    """A string, or text blocks joined without a separator. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    return "".join(_text(block, f"{param}[{i}]") for i, block in enumerate(blocks_of(content, param)))


def blocks_of(content: Any, param: str) -> list[Mapping[str, Any]]:
    """Raises InvalidRequest."""
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise InvalidRequest(f"{param} must be a string or a list of content blocks", param)
    return content


def last_breakpoint(body: Mapping[str, Any]) -> Breakpoint | None:
    """The place up to which the client wants the prompt cached. ``body`` has passed validation."""
    messages, system = body["messages"], body.get("system")
    for i in range(len(messages) - 1, -1, -1):
        if (kept := _kept(messages[i].get("content"))) is not None:
            return Breakpoint(system, [*messages[:i], {**messages[i], "content": kept}])
    if (kept := _kept(system)) is not None:
        return Breakpoint(kept, [])
    if any(isinstance(tool, Mapping) and tool.get("cache_control") for tool in body.get("tools") or []):
        return Breakpoint(None, [])
    # At the top of a request it stands for its last block.
    return Breakpoint(system, list(messages)) if body.get("cache_control") else None


def _kept(content: Any) -> list[Any] | None:
    blocks = content if isinstance(content, list) else []
    marked = [i for i, block in enumerate(blocks) if isinstance(block, Mapping) and block.get("cache_control")]
    return blocks[: marked[-1] + 1] if marked else None


def _user(role: str, blocks: Sequence[Mapping[str, Any]], param: str) -> list[dict[str, Any]]:
    """Tool results become messages of their own; the texts between them stay together."""
    made: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        place = f"{param}[{i}]"
        if block.get("type") == "tool_result":
            made.append(
                {"role": "tool", "tool_call_id": _id(block, "tool_use_id", place), "content": _result(block, place)}
            )
        elif made and made[-1]["role"] == role:
            made[-1]["content"] += _text(block, place)
        else:
            made.append({"role": role, "content": _text(block, place)})
    return made or [{"role": role, "content": ""}]


def _assistant(blocks: Sequence[Mapping[str, Any]], param: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        place = f"{param}[{i}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                continue  # nobody but its maker can read it
            case "tool_use":
                calls.append(_call(block, place))
            case _:
                texts.append(_text(block, place))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _call(block: Mapping[str, Any], param: str) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise InvalidRequest(f"{param}: a tool_use block needs a name and an input object", param)
    function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
    return {"id": _id(block, "id", param), "type": "function", "function": function}


def _result(block: Mapping[str, Any], param: str) -> str:
    content = block.get("content")
    return "" if content is None else text_of(content, f"{param}.content")


def _id(block: Mapping[str, Any], key: str, param: str) -> str:
    value = block.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param}.{key} must be the id of a tool_use block", f"{param}.{key}")
    return value


def _text(block: Mapping[str, Any], param: str) -> str:
    kind, text = block.get("type"), block.get("text")
    if kind == "document":
        source = block.get("source")
        if isinstance(source, Mapping) and source.get("type") == "text":
            kind, text = "text", source.get("data")
    if kind != "text":
        raise InvalidRequest(
            f"{param}: {str(kind)[:40]!r} blocks are not supported here: this model takes text; leave it out", param
        )
    if not isinstance(text, str):
        raise InvalidRequest(
            f'{param}: a text block needs its text as a string: {{"type": "text", "text": "..."}}', param
        )
    return text
