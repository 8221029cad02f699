"""What a tier is: the contract that host and disk keep, and the words all tiers share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch


class TierName(StrEnum):
    """Config and metric names of the tiers, fastest first."""

    GPU = "gpu"
    CPU = "cpu"
    DISK = "disk"


class IntegrityError(Exception):
    """A stored chunk failed verification. ``cause`` is a bounded label (see ``CAUSES``)."""

    CAUSES = ("missing", "header", "identity", "tokens", "length", "checksum", "io")

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


class PutOutcome(StrEnum):
    STORED = "stored"
    FULL = "full"  # no room: the caller evicts and tries again, or drops the store
    READ_ONLY = "read_only"  # the tier can't write now (disk full, permission); it recovers by itself
    OVERSIZE = "oversize"  # larger than the whole tier; never retried


@dataclass(slots=True)
class ChunkStats:
    """What policies look at. Times are seconds of the store's clock (wall clock in production)."""

    accesses: int = 1
    last_access: float = 0.0
    created: float = 0.0
    important_share: float = 1.0  # moving average of the share of important tokens, 0..1


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """The metadata of a chunk, enough to rebuild the prefix tree without touching payload bytes."""

    key: bytes  # 16 bytes: H(parent, token ids)
    parent: bytes  # 16 bytes: parent chunk's key, or the namespace root's key
    identity: bytes  # 32 bytes: identity digest of model, weights, dtype, ... without namespace
    n_tokens: int
    depth: int  # number of ancestors that are chunks; 0 = first chunk of a prefix


@dataclass(frozen=True, slots=True)
class TierUsage:
    capacity_bytes: int
    used_bytes: int
    chunks: int
    read_only: bool = False
    detail: str = ""  # why it is read-only, for /health


class Tier(Protocol):
    """A place below the device where packed chunk payloads live. Thread-safe.

    Payload buffers are flat uint8 CPU tensors holding the packed chunk (see ``KVLayout``).
    """

    name: TierName

    def has(self, key: bytes) -> bool: ...

    def put(self, record: ChunkRecord, tokens: bytes, payload: torch.Tensor, stats: ChunkStats) -> PutOutcome:
        """Copy the payload in (never keeps a reference), replacing any older copy of the key.

        ``tokens`` are little-endian int32 ids. Reserves room before it allocates; leaves nothing behind
        unless it returns STORED. Never raises for a full or broken medium: that is an outcome.
        """
        ...

    def get_into(self, record: ChunkRecord, tokens: bytes, target: torch.Tensor, n_tokens: int) -> None:
        """Verify the stored chunk (header, identity, token ids, length, checksum), then copy its first
        ``n_tokens`` tokens into ``target``, a strided ``[layers, 2, kv_heads, n_tokens, head_dim]`` view
        of the arena. Raises IntegrityError; target's content is then undefined and must not be used.
        """
        ...

    def drop(self, key: bytes) -> None:
        """Forget the key; unknown keys are ignored."""
        ...

    def usage(self) -> TierUsage: ...

    def close(self) -> None: ...
