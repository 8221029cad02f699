from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.keys import KEY_BYTES, chunk_key, decode_tokens, encode_tokens, root_key

IDENTITY = bytes(32)


def test_keys_are_the_same_in_every_process():
    script = (
        "from kvstore.keys import *; p = root_key(bytes(32), 'tenant');"
        "print(p.hex(), chunk_key(p, encode_tokens([1, 2, 3])).hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()[1]
        for seed in ("0", "1", "random")
    }
    assert printed == {chunk_key(root_key(IDENTITY, "tenant"), encode_tokens([1, 2, 3])).hex()}


def test_a_key_depends_on_everything_before_it():
    root = root_key(IDENTITY, "")
    keys = {
        root,
        root_key(IDENTITY, "a"),
        root_key(bytes(31) + b"\1", ""),
        chunk_key(root, encode_tokens([1])),
        chunk_key(root, encode_tokens([1, 2])),
        chunk_key(root, encode_tokens([2, 1])),
        chunk_key(root_key(IDENTITY, "a"), encode_tokens([1])),
        chunk_key(chunk_key(root, encode_tokens([1])), encode_tokens([2])),
    }
    assert len(keys) == 8
    assert {len(key) for key in keys} == {KEY_BYTES}


def test_bytes_cannot_move_between_identity_and_namespace():
    assert root_key(b"identity" + b"a", "b") != root_key(b"identity", "ab")


def test_a_root_is_never_a_chunk_key():
    assert root_key(bytes(16), "abcd") != chunk_key(bytes(16), b"abcd")


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_tokens_round_trip(ids):
    encoded = encode_tokens(ids)
    assert len(encoded) == 4 * len(ids)
    assert decode_tokens(encoded).tolist() == ids
    assert encode_tokens(np.array(ids, dtype=np.int64)) == encoded


def test_tokens_are_little_endian():
    assert encode_tokens([1, 258]) == b"\1\0\0\0\2\1\0\0"


@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1])
def test_ids_that_do_not_fit_are_refused(bad):
    with pytest.raises(ValueError, match="32 bits"):
        encode_tokens([1, bad])
