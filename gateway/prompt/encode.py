"""Prompts to token ids: the one way from a request to what the engine and the prefix cache see."""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

from gateway.prompt.control import ControlTokens
from gateway.prompt.normalise import NormaliseLevel, Normaliser
from gateway.prompt.template import ChatTemplate, PromptError
from gateway.prompt.token_bytes import TokenBytes
from gateway.protocol.requests import ChatRequest

#: Shorter texts are encoded in less time than it takes to care.
_MEMO_MIN_CHARS = 512
_MEMO_MAX_CHARS = 4 * 1024 * 1024

#: More tokens than ``<think>`` and the blanks after it can be.
_THOUGHT_TAIL = 12


class PromptEncoder:
    """Encodes chat requests and plain prompts. Thread-safe; call it off the event loop.

    Args:
        tokenizer: a fast tokenizer of transformers.
        normalise: a NormaliseLevel.
    """

    def __init__(self, tokenizer: Any, normalise: str = NormaliseLevel.SAFE) -> None:
        self._normaliser = Normaliser(normalise)
        self._control = ControlTokens(tokenizer)
        self._template = ChatTemplate(tokenizer, self._control, self._normaliser)
        self._tokenizer = tokenizer
        self.token_bytes = TokenBytes(tokenizer)
        self._whole: Tokenizer = tokenizer.backend_tokenizer
        self._whole.no_truncation()
        self._whole.no_padding()
        self._inner, self._first = _plain_tokenizers(self._whole, self._control.texts)
        # A model may know a control token's text as an ordinary piece; its unknown token is no such leak.
        self._leaks = self._control.ids - {tokenizer.unk_token_id}
        self._memo = _Memo(_MEMO_MAX_CHARS)

    def encode_chat(self, request: ChatRequest) -> list[int]:
        """Token ids of a chat request, as the chat template says, including its BOS.

        Equal to ``tokenizer.apply_chat_template`` on messages without control tokens in them.

        Raises:
            PromptError: the messages can't be rendered.
        """
        ids: list[int] = []
        for at, span in enumerate(self._template.render(request)):
            if span.token_id is not None:
                ids.append(span.token_id)
            else:
                encode = self._encode_first if at == 0 else self._encode_inner
                ids += self._memo.get(span.text, encode)
        return ids

    def ends_in_thought(self, request: ChatRequest, ids: list[int]) -> bool:
        """Whether an answer to this prompt goes on inside ``<think>``, opened by the template or by a prefill."""
        last = request.messages[-1].content or ""
        if request.continue_final_message and last.rfind("<think>") > last.rfind("</think>"):
            return True
        return self.decode(ids[-_THOUGHT_TAIL:]).rstrip().endswith("<think>")

    def encode_completion(self, prompt: str) -> list[int]:
        """Token ids of a plain prompt: control tokens in it count, and the tokenizer's BOS comes once."""
        text = self._normaliser.text(prompt)
        ids = self._memo.get(text, self._encode_whole)
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def encode_bare(self, text: str) -> list[int]:
        """Token ids of a text without what the tokenizer puts around it (BOS, EOS)."""
        return list(self._whole.encode(self._normaliser.text(text), add_special_tokens=False).ids)

    def token_texts(self, ids: list[int]) -> list[str]:
        """The tokens as the vocabulary spells them."""
        return [str(token) for token in self._tokenizer.convert_ids_to_tokens(ids)]

    def decode(self, ids: list[int]) -> str:
        """Text of ids, control tokens too."""
        return str(self._whole.decode(ids, skip_special_tokens=False))

    def _encode_whole(self, text: str) -> list[int]:
        return list(self._whole.encode(text).ids)

    def _encode_first(self, text: str) -> list[int]:
        return self._encode_plain(self._first, text)

    def _encode_inner(self, text: str) -> list[int]:
        return self._encode_plain(self._inner, text)

    def _encode_plain(self, tokenizer: Tokenizer, text: str) -> list[int]:
        ids = list(tokenizer.encode(text, add_special_tokens=False).ids)
        if self._leaks.isdisjoint(ids):
            return ids
        ids = [i for piece in self._control.break_up(text) for i in self._inner.encode(piece).ids]
        if not self._leaks.isdisjoint(ids):
            raise PromptError("the text holds a control token that this tokenizer can't write as plain text; remove it")
        return ids


def _plain_tokenizers(backend: Tokenizer, control: frozenset[str]) -> tuple[Tokenizer, Tokenizer]:
    """Copies that read control tokens as ordinary text: for inside a prompt, and for its very beginning.

    They differ only where the tokenizer puts a blank before the first word of a text (SentencePiece).
    """
    spec = json.loads(backend.to_str())
    spec["post_processor"] = None
    for token in spec["added_tokens"]:
        token["special"] = token["content"] in control
    first = _load(spec)
    return (_load(spec), first) if _never_prepend(spec["pre_tokenizer"]) else (first, first)


def _load(spec: dict[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _never_prepend(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        changed = [_never_prepend(part) for part in pre_tokenizer["pretokenizers"]]  # every part, not the first only
        return any(changed)
    if pre_tokenizer["type"] == "Metaspace" and pre_tokenizer.get("prepend_scheme") == "first":
        pre_tokenizer["prepend_scheme"] = "never"
        return True
    return False


class _Memo:
    """Least-recently-used texts and their ids, bounded by characters: a long system prompt is encoded once."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._chars = 0
        self._ids: OrderedDict[tuple[Callable[[str], list[int]], str], array[int]] = OrderedDict()
        self._lock = Lock()

    def get(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        if not _MEMO_MIN_CHARS <= len(text) <= self._max_chars:
            return encode(text)
        key = (encode, text)
        with self._lock:
            if (known := self._ids.get(key)) is not None:
                self._ids.move_to_end(key)
                return known.tolist()
        ids = encode(text)
        with self._lock:
            if key not in self._ids:
                self._ids[key] = array("i", ids)
                self._chars += len(text)
            while self._chars > self._max_chars:
                (_, oldest), _ = self._ids.popitem(last=False)
                self._chars -= len(oldest)
        return ids
