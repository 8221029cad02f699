"""A stored chunk: how it is cut into values, the header of a value, and its verification.

A value is one layer group of one chunk: a 4,080-byte header, then the group's bytes of the packed payload.
LMDB puts 16 bytes of its own before a large value, so the payload begins on a page.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvstore.keys import TOKEN_BYTES
from kvstore.layout import KVLayout
from kvstore.tiers.base import ChunkRecord, IntegrityError

HEADER_BYTES = 4080
HEADER_VERSION = 1

_MAGIC = b"KVCHUNK\n"
_CHECKSUM = struct.Struct("<Q")  # xxh3-64 of all header bytes before it
_FIELDS = struct.Struct("<8sHHI16s16s32sQQQ")
_FIELD_AREA = HEADER_BYTES - _CHECKSUM.size

Bytes = npt.NDArray[np.uint8]

#: numpy has no bf16 or fp8: elements are copied as integers of the same size.
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a value says about itself. ``payload_sum`` and ``tokens_sum`` are xxh3-64."""

    key: bytes
    parent: bytes
    identity: bytes
    n_tokens: int
    group: int
    payload_bytes: int
    payload_sum: int
    tokens_sum: int

    def pack(self) -> bytes:
        """``HEADER_BYTES`` bytes."""
        fields = _FIELDS.pack(
            _MAGIC,
            HEADER_VERSION,
            self.group,
            self.n_tokens,
            self.key,
            self.parent,
            self.identity,
            self.payload_bytes,
            self.payload_sum,
            self.tokens_sum,
        ).ljust(_FIELD_AREA, b"\0")
        return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))

    @classmethod
    def unpack(cls, value: memoryview) -> ChunkHeader:
        """Read the head of a value. Raises IntegrityError ``length`` or ``header``."""
        if len(value) < HEADER_BYTES:
            raise IntegrityError("length", f"{len(value)} bytes are less than a header")
        area = value[:_FIELD_AREA]
        if _CHECKSUM.unpack_from(value, _FIELD_AREA)[0] != xxhash.xxh3_64_intdigest(area):
            raise IntegrityError("header", "header checksum does not match")
        magic, version, group, n_tokens, key, parent, identity, payload_bytes, payload_sum, tokens_sum = (
            _FIELDS.unpack_from(area)
        )
        if magic != _MAGIC or version != HEADER_VERSION:
            raise IntegrityError("header", f"not a version {HEADER_VERSION} chunk header")
        return cls(key, parent, identity, n_tokens, group, payload_bytes, payload_sum, tokens_sum)


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """Layers ``[lo, hi)`` of a chunk and where their bytes lie in its packed payload."""

    index: int
    lo: int
    hi: int
    start: int
    stop: int

    @property
    def payload_bytes(self) -> int:
        return self.stop - self.start


def group_spans(layout: KVLayout, n_tokens: int) -> Iterator[GroupSpan]:
    """The values that a chunk of ``n_tokens`` is cut into, in order."""
    layer_bytes = layout.payload_bytes(n_tokens) // layout.layers
    for index, (lo, hi) in enumerate(layout.groups):
        yield GroupSpan(index, lo, hi, lo * layer_bytes, hi * layer_bytes)


def check_put(layout: KVLayout, record: ChunkRecord, tokens: bytes, payload: torch.Tensor) -> Bytes:
    """The payload's bytes as an array, without a copy. Raises ValueError for a caller's mistake."""
    if not 1 <= record.n_tokens <= layout.chunk_size or len(tokens) != record.n_tokens * TOKEN_BYTES:
        raise ValueError(f"{record.n_tokens} tokens of {len(tokens)} bytes do not fit a chunk of {layout.chunk_size}")
    needed = layout.payload_bytes(record.n_tokens)
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() < needed:
        raise ValueError(f"payload must be a flat uint8 tensor of at least {needed} bytes")
    array: Bytes = payload.numpy()
    return array[:needed]


def check_target(layout: KVLayout, record: ChunkRecord, target: torch.Tensor, n_tokens: int) -> None:
    """Raises ValueError unless ``target`` can take ``n_tokens`` tokens of the chunk."""
    shape = (layout.layers, 2, layout.kv_heads, n_tokens, layout.head_dim)
    if tuple(target.shape) != shape or target.dtype != layout.dtype:
        raise ValueError(f"target must be {shape} of {layout.dtype}, not {tuple(target.shape)} of {target.dtype}")
    if not 1 <= n_tokens <= record.n_tokens:
        raise ValueError(f"a chunk of {record.n_tokens} tokens cannot give {n_tokens}")


def verify_record(stored: ChunkRecord | ChunkHeader, wanted: ChunkRecord) -> None:
    """Raises IntegrityError ``identity`` or ``header`` unless both describe the same chunk."""
    if stored.identity != wanted.identity:
        raise IntegrityError("identity", "stored by another model, dtype, tokenizer or layout")
    for name in ("key", "parent", "n_tokens"):
        if getattr(stored, name) != getattr(wanted, name):
            raise IntegrityError("header", f"{name} is not the one asked for")


def load_group(
    layout: KVLayout,
    value: memoryview,
    record: ChunkRecord,
    tokens_sum: int,
    span: GroupSpan,
    target: torch.Tensor,
) -> None:
    """Copy the first tokens of one stored value into its layers of ``target``, and verify all of it.

    ``tokens_sum`` is the xxh3-64 of the token bytes asked for; ``target`` is as in ``copy_group``. Raises
    IntegrityError; then ``target`` holds anything and must not be used.
    """
    header = ChunkHeader.unpack(value)
    verify_record(header, record)
    if header.group != span.index:
        raise IntegrityError("header", f"value of group {header.group} in place of group {span.index}")
    if header.tokens_sum != tokens_sum:
        raise IntegrityError("tokens", "token ids are not those of the stored chunk")
    if header.payload_bytes != span.payload_bytes or len(value) - HEADER_BYTES != span.payload_bytes:
        raise IntegrityError("length", f"{len(value) - HEADER_BYTES} payload bytes instead of {span.payload_bytes}")
    payload: Bytes = np.frombuffer(value, np.uint8, offset=HEADER_BYTES)
    checksum = xxhash.xxh3_64()
    copy_group(layout, payload, record.n_tokens, target, span, checksum)
    if checksum.intdigest() != header.payload_sum:
        raise IntegrityError("checksum", f"payload of group {span.index} does not match its checksum")


def copy_group(
    layout: KVLayout,
    payload: Bytes,
    stored_tokens: int,
    target: torch.Tensor,
    span: GroupSpan,
    checksum: xxhash.xxh3_64,
) -> None:
    """Copy the first tokens of one group's payload into its layers of ``target``; all of it goes into ``checksum``.

    ``target`` is ``[layers, 2, kv_heads, n_tokens, head_dim]``, strided, on any device. On the host the copy is
    numpy's: one thread without the GIL. torch would split each copy over its thread pool, which is several times
    slower whenever the cores are busy computing. It goes layer by layer: what the checksum has just read lies in the
    core's cache.
    """
    element = _SAME_SIZE[layout.dtype.itemsize]
    into = target[span.lo : span.hi].view(element)
    shape = (span.hi - span.lo, 2, layout.kv_heads, stored_tokens, layout.head_dim)
    stored = payload.view(f"i{layout.dtype.itemsize}").reshape(shape)
    wanted = stored[:, :, :, : target.shape[3]]
    if target.device.type == "cpu":
        for layer, rows in enumerate(into.numpy()):
            checksum.update(stored[layer].data)
            np.copyto(rows, wanted[layer])
    else:
        checksum.update(payload.data)
        # torch refuses to wrap read-only memory quietly, and LMDB's map is read-only: stage it.
        into.copy_(torch.from_numpy(wanted if wanted.flags.writeable else wanted.copy()))
