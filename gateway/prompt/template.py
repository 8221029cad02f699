"""Messages to rendered spans through the tokenizer's own chat template."""

from __future__ import annotations

import logging
from typing import Any

import jinja2
import orjson

from gateway.prompt.control import ControlTokens, Span
from gateway.prompt.normalise import Normaliser
from gateway.prompt.tools import in_hermes_format
from gateway.protocol.messages import ChatMessage
from gateway.protocol.requests import ChatRequest

log = logging.getLogger(__name__)


class PromptError(Exception):
    """The messages can't be turned into a prompt; the sentence is for the client (HTTP 400)."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class ChatTemplate:
    """Renders chat requests. What the client sent never becomes a control token (see ControlTokens)."""

    def __init__(self, tokenizer: Any, control: ControlTokens, normaliser: Normaliser) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._normaliser = normaliser
        template = tokenizer.chat_template
        self._knows_tools = "tools" in (str(template) if template else "")
        self._knows_developer = "developer" in (str(template) if template else "")

    def render(self, request: ChatRequest) -> list[Span]:
        """The prompt of a chat request.

        Raises:
            PromptError: no template, the template refuses the messages, or its arguments are not its own.
        """
        if not self._tokenizer.chat_template:
            raise PromptError(
                "this model has no chat template, so it can't take messages; use POST /v1/completions with a "
                "plain prompt, or serve a model with a chat template (an instruct or chat model)"
            )
        messages = [self._message(message) for message in request.messages]
        arguments = dict(request.chat_template_kwargs or {})
        if taken := set(arguments) & set(self._tokenizer.special_tokens_map):
            raise PromptError(f"{min(taken)!r} is set by the tokenizer; remove it", "chat_template_kwargs")
        tools = self._normaliser.tools(request.rendered_tools)
        messages, rest, placeholders = self._control.mask(messages, {"tools": tools, "arguments": arguments})
        tools = rest["tools"]
        if not self._knows_tools:
            messages, tools = in_hermes_format(messages, tools), []
        rendered = self._apply(messages, tools or None, rest["arguments"], request)
        return self._control.cut(rendered, placeholders)

    def _apply(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        arguments: dict[str, Any],
        request: ChatRequest,
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=request.wants_generation_prompt,
                    continue_final_message=bool(request.continue_final_message),
                    **arguments,
                )
            )
        except jinja2.TemplateError as error:
            raise PromptError(f"the model's chat template refuses these messages: {error.message}") from error
        except Exception as error:  # a template is foreign code: what it can't render is the request's problem
            log.debug("chat template failed", exc_info=True)
            raise PromptError(f"the model's chat template can't render these messages: {error}") from error

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        role = message.role
        if role == "developer" and not self._knows_developer:
            role = "system"
        shown: dict[str, Any] = {"role": role, "content": self._normaliser.text(message.content or "")}
        for key in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, key)) is not None:
                shown[key] = value
        if message.tool_calls:
            shown["tool_calls"] = [_tool_call(call.model_dump()) for call in message.tool_calls]
        return shown


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates of the Hub take the arguments as an object; clients send them as a string of JSON."""
    function = call["function"]
    try:
        arguments = orjson.loads(function["arguments"] or "{}")
    except orjson.JSONDecodeError:
        arguments = function["arguments"]
    return {**call, "function": {**function, "arguments": arguments}}
