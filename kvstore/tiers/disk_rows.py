"""Rows of the disk tier's ``chunks`` database: all that is needed to rebuild the prefix tree."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvstore.keys import KEY_BYTES
from kvstore.tiers.base import ChunkRecord, ChunkStats

_ROW = struct.Struct("<16s32sIIQQddd")  # parent, identity, n_tokens, depth, stored bytes, ChunkStats
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class ChunkRow:
    record: ChunkRecord
    stats: ChunkStats
    stored_bytes: int  # of all values, in whole pages

    def pack(self) -> bytes:
        """The row without its key, and an xxh3-64 over both."""
        record, stats = self.record, self.stats
        row = _ROW.pack(
            record.parent,
            record.identity,
            record.n_tokens,
            record.depth,
            self.stored_bytes,
            stats.accesses,
            stats.last_access,
            stats.created,
            stats.important_share,
        )
        return row + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(record.key + row))

    @classmethod
    def unpack(cls, key: bytes, packed: bytes) -> ChunkRow | None:
        """None for a row that is damaged."""
        row, checksum = packed[: _ROW.size], packed[_ROW.size :]
        if len(key) != KEY_BYTES or checksum != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(key + row)):
            return None
        parent, identity, n_tokens, depth, stored_bytes, *stats = _ROW.unpack(row)
        return cls(ChunkRecord(key, parent, identity, n_tokens, depth), ChunkStats(*stats), stored_bytes)
