"""How much one request may ask for, looked at before anything is validated: a huge one costs next to nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.config import LimitSettings
from gateway.protocol.errors import InvalidRequest

#: Lists whose length is what the request costs to read, in the body of any endpoint.
_MESSAGES = ("messages", "input")


def check_limits(body: Mapping[str, Any], limits: LimitSettings) -> None:
    """Malformed values pass: validation names them better.

    Raises:
        InvalidRequest: more messages or answers than ``[limits]`` allows.
    """
    for param in _MESSAGES:
        value = body.get(param)
        if isinstance(value, list) and len(value) > limits.max_messages:
            raise InvalidRequest(
                f"{param}: at most {limits.max_messages} are allowed, not {len(value)}; send fewer, or raise "
                "[limits].max_messages",
                param,
            )
    n = body.get("n")
    asked = int(n) if isinstance(n, int | float) and not isinstance(n, bool) else 1
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    if asked * prompts > limits.max_choices:
        param = "n" if asked > 1 else "prompt"
        raise InvalidRequest(
            f"{param}: at most {limits.max_choices} answers to one request are allowed, not {asked * prompts}; send "
            "several requests, or raise [limits].max_choices",
            param,
        )
