from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import xxhash

from kvstore.chunk import (
    HEADER_BYTES,
    ChunkHeader,
    check_put,
    check_target,
    group_spans,
    load_group,
)
from kvstore.tiers.base import IntegrityError
from tests.kvstore.chunks import ODD, SMALL, SMOLLM2, Chunk, arena_target, make_chunk

CHUNK = make_chunk(SMALL, seed=1)
[SPAN] = group_spans(SMALL, SMALL.chunk_size)


def header_of(chunk: Chunk, **changes: object) -> ChunkHeader:
    header = ChunkHeader(
        key=chunk.record.key,
        parent=chunk.record.parent,
        identity=chunk.record.identity,
        n_tokens=chunk.record.n_tokens,
        group=0,
        payload_bytes=chunk.payload.numel(),
        payload_sum=xxhash.xxh3_64_intdigest(chunk.payload.numpy().data),
        tokens_sum=xxhash.xxh3_64_intdigest(chunk.tokens),
    )
    return replace(header, **changes)


def load(value: bytes, chunk: Chunk, target: torch.Tensor) -> None:
    load_group(SMALL, memoryview(value), chunk.record, xxhash.xxh3_64_intdigest(chunk.tokens), SPAN, target)


def cause_of(value: bytes, chunk: Chunk = CHUNK) -> str:
    with pytest.raises(IntegrityError) as caught:
        load(value, chunk, arena_target(SMALL, SMALL.chunk_size))
    return caught.value.cause


PAYLOAD = CHUNK.payload.numpy().tobytes()
VALUE = header_of(CHUNK).pack() + PAYLOAD


def test_header_round_trip():
    packed = header_of(CHUNK).pack()
    assert len(packed) == HEADER_BYTES
    assert ChunkHeader.unpack(memoryview(packed)) == header_of(CHUNK)


@pytest.mark.parametrize("n_tokens", [1, 9, SMALL.chunk_size])
def test_a_good_value_gives_its_first_tokens(n_tokens):
    target = arena_target(SMALL, n_tokens)
    load(VALUE, CHUNK, target)
    assert torch.equal(target, CHUNK.kv[:, :, :, :n_tokens])


@pytest.mark.parametrize("byte", [0, 9, 14, 40, 90, 110, 2000, HEADER_BYTES - 1])
def test_any_flipped_bit_of_the_header_is_found(byte):
    bad = bytearray(VALUE)
    bad[byte] ^= 0x10
    assert cause_of(bytes(bad)) == "header"


@pytest.mark.parametrize("offset", [0, 1, len(PAYLOAD) // 2, len(PAYLOAD) - 1])
def test_any_flipped_bit_of_the_payload_is_found(offset):
    bad = bytearray(VALUE)
    bad[HEADER_BYTES + offset] ^= 1
    assert cause_of(bytes(bad)) == "checksum"


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, len(VALUE) - 1])
def test_a_truncated_value_is_found(size):
    assert cause_of(VALUE[:size]) == "length"


def test_a_value_that_is_too_long_is_found():
    assert cause_of(VALUE + b"\0") == "length"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"identity": bytes(32)}, "identity"),
        ({"key": bytes(16)}, "header"),
        ({"parent": bytes(16)}, "header"),
        ({"n_tokens": 31}, "header"),
        ({"group": 1}, "header"),
        ({"tokens_sum": 0}, "tokens"),
        ({"payload_bytes": len(PAYLOAD) - 4}, "length"),
        ({"payload_sum": 0}, "checksum"),
    ],
)
def test_a_sound_header_of_something_else_is_found(changes, cause):
    assert cause_of(header_of(CHUNK, **changes).pack() + PAYLOAD) == cause


@pytest.mark.parametrize("layout", [SMALL, ODD, SMOLLM2])
@pytest.mark.parametrize("n_tokens", [1, 5, 7])
def test_groups_cover_the_payload_in_order(layout, n_tokens):
    spans = list(group_spans(layout, n_tokens))
    assert [(span.lo, span.hi) for span in spans] == layout.groups
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == layout.payload_bytes(n_tokens)


@pytest.mark.parametrize("payload", [CHUNK.payload[:-1], CHUNK.payload.view(torch.int16), CHUNK.payload.view(2, -1)])
def test_a_payload_of_the_wrong_form_is_the_callers_mistake(payload):
    with pytest.raises(ValueError, match="flat uint8"):
        check_put(SMALL, CHUNK.record, CHUNK.tokens, payload)


def test_tokens_that_do_not_fit_the_record_are_the_callers_mistake():
    with pytest.raises(ValueError, match="do not fit"):
        check_put(SMALL, CHUNK.record, CHUNK.tokens[:-4], CHUNK.payload)


def test_a_target_of_the_wrong_form_is_the_callers_mistake():
    with pytest.raises(ValueError, match="target"):
        check_target(SMALL, CHUNK.record, arena_target(SMALL, 4), 5)
    with pytest.raises(ValueError, match="target"):
        check_target(SMALL, CHUNK.record, arena_target(SMALL, 4).float(), 4)
    short = make_chunk(SMALL, n_tokens=3)
    with pytest.raises(ValueError, match="cannot give"):
        check_target(SMALL, short.record, arena_target(SMALL, 4), 4)
