"""Tools for models whose chat template doesn't know them: a system block and turns in the Hermes format.

The format is NousResearch's Hermes function calling, which Qwen's templates use too; see docs/tools.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_BLOCK = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def in_hermes_format(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the tools in the first system message, calls as text, and results as user turns.

    Results that follow one another are one turn.
    """
    told: list[dict[str, Any]] = []
    in_results = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and in_results:
            told[-1]["content"] += "\n" + _result(message)
        elif is_result:
            told.append({"role": "user", "content": _result(message)})
        else:
            told.append(_with_calls(message) if message.get("tool_calls") else dict(message))
        in_results = is_result
    return _with_block(told, tools) if tools else told


def _with_block(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    block = _BLOCK.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{block}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": block}, *messages]


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        "<tool_call>\n"
        + json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False)
        + "\n</tool_call>"
        for call in message["tool_calls"]
    ]
    content = "\n".join([message["content"], *calls] if message["content"] else calls)
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def _result(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"
