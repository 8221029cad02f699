"""Where a prompt and its closest cached relative part, and the likely reason. Heuristics for people, not for code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.prompt.encode import PromptEncoder
from gateway.prompt.template import PromptError
from gateway.protocol.requests import ChatRequest

#: Tokens shown on either side of the place.
_WINDOW = 24

_TIME = re.compile(
    r"\d{4}-\d{2}-\d{2}|\d{1,2}:\d{2}(?::\d{2})?|\b1[5-9]\d{8}(?:\d{3})?\b|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
)
_RANDOM = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F-]{8,}|(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[\w-]{8,}")

_ADVICE = {
    "timestamp": "a date or time differs; move it behind the long text, or round it to the day",
    "random_id": "an id that changes with every request differs; move it behind the long text, or leave it out",
    "whitespace": "only white space differs; send the text byte for byte alike, or set normalise to nfc+space, which "
    "drops trailing blanks",
    "tool_order": "the tools come in another order; send them sorted",
    "reasoning_dropped": "one side has the model's <think> text and the other hasn't; send answers back as they came",
    "different_text": "the text differs here; put what changes behind what stays the same",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Divergence:
    """Texts around the first token that isn't cached, and which message it lies in (None: none of them)."""

    token_index: int
    message_index: int | None
    role: str | None
    before: str
    yours: str
    cached: str


def locate(
    encoder: PromptEncoder, ids: Sequence[int], at: int, cached: Sequence[int], request: ChatRequest | None
) -> Divergence:
    """Describe position ``at`` of a prompt whose closest cached relative goes on with ``cached``."""
    message = _message_at(encoder, ids, at, request) if request is not None else None
    return Divergence(
        token_index=at,
        message_index=message,
        role=request.messages[message].role if request is not None and message is not None else None,
        before=encoder.decode(list(ids[max(0, at - _WINDOW) : at])),
        yours=encoder.decode(list(ids[at : at + _WINDOW])),
        cached=encoder.decode(list(cached[:_WINDOW])),
    )


def likely_cause(place: Divergence, tools: Sequence[str] = ()) -> tuple[str, str]:
    """A code and a sentence with the remedy."""
    code = _code(place, tools)
    return code, _ADVICE[code]


def _code(place: Divergence, tools: Sequence[str]) -> str:
    if ("<think>" in place.yours) != ("<think>" in place.cached):
        return "reasoning_dropped"
    ours, theirs = "".join(place.yours.split()), "".join(place.cached.split())
    if ours and theirs and (ours.startswith(theirs[:20]) or theirs.startswith(ours[:20])):
        return "whitespace"
    first_ours, first_theirs = (_first_name(text, tools) for text in (place.yours, place.cached))
    if first_ours and first_theirs and first_ours != first_theirs:
        return "tool_order"
    for code, pattern in (("timestamp", _TIME), ("random_id", _RANDOM)):
        if _covers(pattern, place.before, place.yours) and _covers(pattern, place.before, place.cached):
            return code
    return "different_text"


def _first_name(text: str, names: Sequence[str]) -> str | None:
    found = [(text.find(name), name) for name in names if name in text]
    return min(found)[1] if found else None


def _covers(pattern: re.Pattern[str], before: str, after: str) -> bool:
    """Whether a match of the pattern in the joined text reaches over the place, or begins right at it."""
    return any(m.start() <= len(before) + 1 and m.end() > len(before) for m in pattern.finditer(before + after))


def _message_at(encoder: PromptEncoder, ids: Sequence[int], at: int, request: ChatRequest) -> int | None:
    """The first message with which the rendered prompt reaches past the token, by bisection over prompts cut short."""
    low, high = 0, len(request.messages)  # with ``high`` messages it is reached, with ``low`` it isn't
    if not _reaches(encoder, ids, at, request, high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _reaches(encoder, ids, at, request, middle):
            high = middle
        else:
            low = middle
    return high - 1


def _reaches(encoder: PromptEncoder, ids: Sequence[int], at: int, request: ChatRequest, count: int) -> bool:
    cut = request.model_copy(
        update={
            "messages": request.messages[:count],
            "add_generation_prompt": False,
            "continue_final_message": False,
        }
    )
    try:
        rendered = encoder.encode_chat(cut)
    except PromptError:  # some templates want the roles to alternate to the end
        return False
    return common_length(rendered, ids) > at


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
