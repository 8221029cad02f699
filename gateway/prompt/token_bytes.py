"""Token ids to their bytes, also where a token ends inside a character."""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

#: SentencePiece's sign for a blank.
_BLANK = "\u2581"


class TokenBytes:
    """The bytes each token of a tokenizer adds to a text.

    Knows the two forms vocabularies have: byte-level BPE (GPT-2 and after: one printable character a byte) and
    SentencePiece with byte fallback (``<0xF0>`` is one byte). Added tokens stand for their own text.

    Args:
        tokenizer: a fast tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        self._byte_level = "ByteLevel" in json.dumps([spec.get("decoder"), spec.get("pre_tokenizer")])
        self._bytes = {char: byte for byte, char in byte_characters().items()}

    def of(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that the vocabulary pads with."""
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._byte_level:
            # A character that stands for no byte can only come from a broken vocabulary: it stands for itself.
            return b"".join(bytes([self._bytes[char]]) if char in self._bytes else char.encode() for char in str(token))
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(byte.group(1), 16)])
        return str(token).replace(_BLANK, " ").encode()


def byte_characters() -> dict[int, str]:
    """Byte to the character that stands for it in byte-level vocabularies (GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
