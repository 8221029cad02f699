"""What a request can get wrong; the API layer answers it with HTTP 400."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

_SHOWN_INPUT = 60


class InvalidRequest(Exception):
    """A request that can't be served as sent. The message is for the client and says what to do."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def renamed(self, old: str, new: str) -> InvalidRequest:
        """The same about a parameter that has another name in the body that was sent."""
        param = self.param and self.param.replace(old, new)
        return InvalidRequest(str(self).replace(old, new), param, self.code)

    @classmethod
    def from_validation(cls, error: ValidationError) -> InvalidRequest:
        """The first of pydantic's findings, named by the path of the field as a client would write it."""
        found = error.errors(include_url=False)[0]
        param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"]).lstrip(".")
        if found["type"] == "missing":
            return cls(f"{param} is required", param)
        said = found["msg"].removeprefix("Value error, ")
        if found["type"] == "value_error":
            return cls(f"{param}: {said}" if param else said, param or None)
        shown = repr(found["input"])
        shown = shown if len(shown) <= _SHOWN_INPUT else shown[:_SHOWN_INPUT] + "..."
        return cls(f"{param}: {said[:1].lower()}{said[1:]}; got {shown}", param)


T = TypeVar("T", bound=BaseModel)


def validated(kind: type[T], body: Mapping[str, Any]) -> T:
    """The body as that type. Raises InvalidRequest."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise InvalidRequest.from_validation(error) from None


class UnsupportedParameter(InvalidRequest):
    """A well-formed parameter whose effect this server doesn't have: refused, never silently dropped."""

    def __init__(self, param: str, remedy: str) -> None:
        super().__init__(f"{param} is not supported by this server: {remedy}", param, "unsupported_parameter")
