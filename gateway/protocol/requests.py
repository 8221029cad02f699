"""Request bodies of the local model: types, ranges, defaults. Unknown fields are ignored, null means unset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

import orjson
from pydantic import (
    AliasChoices,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gateway.engine.types import SamplingParams
from gateway.protocol.errors import InvalidRequest
from gateway.protocol.messages import Body, ChatMessage, Int
from gateway.protocol.structured import Structure, structure_of
from gateway.protocol.tools import ToolUse, tool_use_of
from gateway.protocol.unsupported import refuse_unsupported_chat, refuse_unsupported_completion

#: Most answers one request may ask for (prompts times n).
MAX_CHOICES = 128
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_TEMPLATE_KWARGS_BYTES = 16 * 1024
MAX_TOP_LOGPROBS = 20

#: The OpenAI API's own default for plain completions; chat answers may fill the context.
DEFAULT_COMPLETION_TOKENS = 16

#: Arguments of ``apply_chat_template`` that steer the tokenizer instead of the template's text.
_TOKENIZER_ARGUMENTS = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation documents max_length messages padding "
    "return_assistant_tokens_mask return_dict return_tensors sanitize_control_tokens tokenize tokenizer_kwargs "
    "tools truncation".split()
)


class StreamOptions(Body):
    include_usage: bool | None = None


class SamplingFields(Body):
    """What chat and plain completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = Field(
        None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    logit_bias: dict[int, float] | None = None
    stop: list[str] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    _structure: Structure | None = PrivateAttr(None)

    @property
    def retention_seconds(self) -> float | None:
        """How long OpenAI's ``prompt_cache_retention`` asks to keep the prompt cached; None = as it comes."""
        return 24 * 3600.0 if self.prompt_cache_retention == "24h" else None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list):
            if len(value) > MAX_STOP_STRINGS:
                raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, not {len(value)}")
            if "" in value:
                raise ValueError("a stop string must not be empty; leave it out")
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if len(value) > MAX_LOGIT_BIAS:
            raise ValueError(f"at most {MAX_LOGIT_BIAS} tokens can have a bias, not {len(value)}")
        return {_token_id(key): _bias_value(bias) for key, bias in value.items()}

    @property
    def structure(self) -> Structure | None:
        """What the answer must look like; None = free text."""
        return self._structure

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def logprob_count(self) -> int | None:
        """Alternatives wanted at each token beside its own log-probability; None = no log-probabilities."""
        return None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        """Most tokens of an answer that the client wants; None = as many as fit."""
        return self.max_tokens

    def sampling(self, *, room: int, vocab_size: int, choice: int) -> SamplingParams:
        """Sampling settings of one answer.

        Args:
            room: tokens that fit the context after the prompt; a larger wish is cut to it.
            vocab_size: ids at or above it can't be biased.
            choice: index of the answer; with a seed, each draws from a stream of its own.

        Raises:
            InvalidRequest: a token id outside of the vocabulary.
        """
        bias = self.logit_bias or {}
        stop_ids = self.stop_token_ids or []
        for param, ids in (("logit_bias", bias), ("stop_token_ids", stop_ids)):
            if wrong := [i for i in ids if not 0 <= i < vocab_size]:
                raise InvalidRequest(f"{param}: token {wrong[0]} is not in the vocabulary (0..{vocab_size - 1})", param)
        return SamplingParams(
            max_tokens=min(room, self.token_limit or room),
            temperature=_default(self.temperature, 1.0),
            top_p=_default(self.top_p, 1.0),
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=None if self.seed is None else _int64(self.seed + choice),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_default(self.repetition_penalty, 1.0),
            logit_bias=bias,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(stop_ids),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.logprob_count,
        )


class ChatRequest(SamplingFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    _tool_use: ToolUse = PrivateAttr(default_factory=ToolUse)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_arguments(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := _TOKENIZER_ARGUMENTS & set(value or ()):
            raise ValueError(f"{min(taken)!r} controls the tokenizer and can't be set by a request; remove it")
        if value and len(orjson.dumps(value)) > MAX_TEMPLATE_KWARGS_BYTES:
            raise ValueError(f"more than {MAX_TEMPLATE_KWARGS_BYTES} bytes; send less")
        return value

    @model_validator(mode="after")
    def _one_ending(self) -> Self:
        """An answer is begun for the model by ``continue_final_message``, or by ``prefix`` on the last message."""
        last = self.messages[-1]
        self.continue_final_message = bool(self.continue_final_message or last.prefix)
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other; send one of them")
        if last.role != "assistant" or not last.content:
            raise ValueError("continue_final_message needs an assistant message with content last; add one")
        return self

    @field_validator("top_logprobs")
    @classmethod
    def _logprobs_first(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true beside it")
        return value

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_generation_prompt(self) -> bool:
        return not self.continue_final_message and self.add_generation_prompt is not False

    @property
    def rendered_tools(self) -> list[dict[str, Any]]:
        """Tools the template shows the model; none when the client forbids calls."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def tool_use(self) -> ToolUse:
        """Which tools the model may or must call."""
        return self._tool_use

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ChatRequest:
        """Raises InvalidRequest."""
        refuse_unsupported_chat(body)
        request = _validated(cls, body)
        request._tool_use = tool_use_of(request.tools, request.tool_choice, request.parallel_tool_calls)
        return request


class CompletionRequest(SamplingFields):
    prompt: list[str | list[int]]
    echo: bool | None = None
    logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> list[str | list[int]]:
        prompts = [value] if isinstance(value, str) or _is_token_list(value) else value
        if not isinstance(prompts, list) or not prompts:
            raise ValueError("send a string, a list of strings, a list of token ids or a list of those lists")
        for prompt in prompts:
            if not (isinstance(prompt, str) or _is_token_list(prompt)):
                raise ValueError("each prompt must be a string or a non-empty list of token ids")
            if not prompt:
                raise ValueError("the prompt is empty; send at least one token")
        return prompts

    @model_validator(mode="after")
    def _few_enough(self) -> Self:
        if len(self.prompt) * self.choices > MAX_CHOICES:
            raise ValueError(f"prompts times n must not be more than {MAX_CHOICES}; send several requests")
        return self

    @field_validator("logprobs")
    @classmethod
    def _no_prompt_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("echo"):
            raise ValueError(
                "with echo it asks for log-probabilities of the prompt, which a prefix cache doesn't have; leave one "
                "of them out"
            )
        return value

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> CompletionRequest:
        """Raises InvalidRequest."""
        refuse_unsupported_completion(body)
        return _validated(cls, body)


T = TypeVar("T", bound=SamplingFields)


def _validated(kind: type[T], body: Mapping[str, Any]) -> T:
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise InvalidRequest.from_validation(error) from None
    request._structure = structure_of(body)
    return request


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise ValueError(f"keys are token ids written as strings of digits, not {key[:20]!r}")
    return int(key)


def _bias_value(bias: Any) -> float:
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
        raise ValueError("values must be numbers from -100 to 100")
    return float(bias)


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
