"""The shape of KV in memory and on disk: what every tier agrees on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Bumped whenever the bytes of a stored chunk change meaning; part of the identity.
LAYOUT_VERSION = 1

#: Values near 2 MiB read at memmove speed from LMDB and stay below malloc's slow path on write.
TARGET_VALUE_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of the KV of one model.

    A *chunk* is ``chunk_size`` tokens of all layers. Its packed payload is one contiguous tensor
    ``[layers, 2, kv_heads, n_tokens, head_dim]`` of ``dtype`` (index 0 of axis 1 is K, 1 is V), where
    ``n_tokens <= chunk_size``. Head-major order is the order of the arena, so a load is one strided
    copy with runs of ``n_tokens * head_dim`` elements.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    chunk_size: int

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a full chunk's payload."""
        return self.bytes_per_token * self.chunk_size

    def payload_bytes(self, n_tokens: int) -> int:
        return self.bytes_per_token * n_tokens

    @property
    def layers_per_group(self) -> int:
        """Layers whose K and V share one stored value (a value is 1-8 MiB where the model allows it)."""
        per_layer = self.chunk_bytes // self.layers
        return max(1, min(self.layers, TARGET_VALUE_BYTES // per_layer))

    @property
    def groups(self) -> list[tuple[int, int]]:
        """Half-open layer ranges, one for each stored value of a chunk."""
        step = self.layers_per_group
        return [(lo, min(lo + step, self.layers)) for lo in range(0, self.layers, step)]

    def packed_view(self, buffer: torch.Tensor, n_tokens: int) -> torch.Tensor:
        """View the head of a flat uint8 buffer as ``[layers, 2, kv_heads, n_tokens, head_dim]``."""
        used = buffer[: self.payload_bytes(n_tokens)]
        return used.view(self.dtype).view(self.layers, 2, self.kv_heads, n_tokens, self.head_dim)
