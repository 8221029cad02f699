"""Tools a request offers, and what it says about calling them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.protocol.errors import InvalidRequest

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]  # a JSON schema
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the model may call. ``tools`` is empty when calls are forbidden; ``forced`` are those it must call."""

    tools: tuple[Tool, ...] = ()
    forced: tuple[Tool, ...] = ()
    most_forced: int = 1  # calls that a forced answer may hold
    parallel: bool = True

    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(tool.name for tool in self.tools))


#: Calls in one answer of ``tool_choice: "required"``; without a limit a small model may never stop calling.
MAX_REQUIRED_CALLS = 8


def tool_use_of(tools: Any, choice: Any, parallel: Any) -> ToolUse:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls`` as they came. An empty list is no tools.

    Raises:
        InvalidRequest: malformed, or a choice that no tool fulfils.
    """
    offered = _tools(tools)
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidRequest("parallel_tool_calls must be true or false", "parallel_tool_calls")
    several = parallel is not False
    if choice is not None and not isinstance(choice, str | dict):
        raise InvalidRequest(_CHOICES, "tool_choice")
    if not offered:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(
                "tool_choice asks for a tool, but tools is empty; send tools or leave it out", "tool_choice"
            )
        return ToolUse()
    match choice:
        case "none":
            return ToolUse()
        case None | "auto":
            return ToolUse(offered, parallel=several)
        case "required":
            return ToolUse(offered, offered, MAX_REQUIRED_CALLS if several else 1, several)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            named = tuple(tool for tool in offered if tool.name == name)
            if not named:
                raise InvalidRequest(f"tool_choice names {name[:64]!r}, which is not in tools", "tool_choice")
            return ToolUse(offered, named, 1, False)
    raise InvalidRequest(_CHOICES, "tool_choice")


_CHOICES = (
    'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}} with the '
    "name of a tool"
)


def _tools(tools: Any) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise InvalidRequest("tools must be a list of objects", "tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools are allowed, not {len(tools)}", "tools")
    read = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    _refuse_twins(read)
    return read


def _refuse_twins(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise InvalidRequest(f"two tools are named {tool.name!r}; give each its own name", "tools")
        seen.add(tool.name)


def _tool(tool: Any, param: str) -> Tool:
    if not isinstance(tool, dict):
        raise InvalidRequest("tools must be a list of objects", "tools")
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequest(
            f'{param} must be a function: {{"type": "function", "function": {{"name": "...", "parameters": {{...}}}}}}',
            param,
        )
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{param}.function.name must be 1 to 128 letters, digits or any of _ . : -", f"{param}.function.name"
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(
            f"{param}.function.parameters must be a JSON schema object", f"{param}.function.parameters"
        )
    return Tool(name, parameters or {"type": "object"}, function.get("strict") is True)
