"""Chunk keys: a chain of 16-byte BLAKE2b digests from the identity down to a chunk's token ids.

Keys are the same in every process and on every machine. They are never trusted alone: the token ids are stored
beside the chunk and compared when it is read.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
TOKEN_BYTES = 4  # one little-endian int32 id

_ROOT_PERSON = b"kvgate.root"
_CHUNK_PERSON = b"kvgate.chunk"
_INT32 = np.iinfo(np.int32)


def root_key(identity_digest: bytes, namespace: str) -> bytes:
    """Key of the root that all first chunks of one tenant namespace hang from."""
    return _digest(_ROOT_PERSON, identity_digest, namespace.encode())


def chunk_key(parent: bytes, token_bytes: bytes) -> bytes:
    """Key of the chunk that holds ``token_bytes`` (little-endian int32 ids) after the prefix ``parent``."""
    return _digest(_CHUNK_PERSON, parent, token_bytes)


def prompt_keys(identity_digest: bytes, namespace: str, ids: Sequence[int], chunk_size: int) -> set[bytes]:
    """Keys of all chunks of a prompt: the whole ones, and its tail under every length that may have been stored."""
    keys: set[bytes] = set()
    parent = root_key(identity_digest, namespace)
    whole = len(ids) // chunk_size * chunk_size
    for at in range(0, whole, chunk_size):
        parent = chunk_key(parent, encode_tokens(ids[at : at + chunk_size]))
        keys.add(parent)
    tail = encode_tokens(ids[whole:])
    keys.update(chunk_key(parent, tail[:end]) for end in range(TOKEN_BYTES, len(tail) + 1, TOKEN_BYTES))
    return keys


def _digest(person: bytes, first: bytes, second: bytes) -> bytes:
    hasher = hashlib.blake2b(digest_size=KEY_BYTES, person=person)
    hasher.update(struct.pack("<QQ", len(first), len(second)))  # framed: no two pairs have the same bytes
    hasher.update(first)
    hasher.update(second)
    return hasher.digest()


def encode_tokens(ids: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Token ids as little-endian int32. Raises ValueError for an id that does not fit."""
    wide = np.asarray(ids, dtype=np.int64)
    if wide.size and (wide.min() < _INT32.min or wide.max() > _INT32.max):
        raise ValueError("token ids must fit in 32 bits")
    return wide.astype("<i4").tobytes()


def decode_tokens(token_bytes: bytes) -> npt.NDArray[np.int32]:
    """The ids of ``encode_tokens``, as a read-only int32 array. Raises ValueError for a broken length."""
    return np.frombuffer(token_bytes, dtype="<i4").astype(np.int32, copy=False)
