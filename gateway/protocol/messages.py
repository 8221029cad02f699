"""Chat messages as clients send them, and the base of all request bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from gateway.prompt.normalise import join_parts


def _whole_number(value: Any) -> Any:
    """JSON has one number type: 1e3 is a whole number, 1.5 is not. Beyond 2**53 a double no longer says which."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


Int = Annotated[int, BeforeValidator(_whole_number)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", validate_by_name=True, validate_by_alias=True)


class FunctionCall(Body):
    name: str
    arguments: str = ""


class ToolCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))
    prefix: bool | None = None  # DeepSeek's and Mistral's word for continue_final_message, on the last message

    @field_validator("content", mode="before")
    @classmethod
    def _one_string(cls, value: Any) -> Any:
        return join_parts(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is required: send a string or a list of text parts")
        return self
