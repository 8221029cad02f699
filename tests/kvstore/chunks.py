"""Chunks to store, for the tests of the tiers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvstore.keys import chunk_key, encode_tokens, root_key
from kvstore.layout import KVLayout
from kvstore.tiers.base import ChunkRecord

IDENTITY = bytes(range(32))
SMALL = KVLayout(layers=4, kv_heads=2, head_dim=16, dtype=torch.bfloat16, chunk_size=32)
ODD = KVLayout(layers=3, kv_heads=1, head_dim=10, dtype=torch.float32, chunk_size=7)
SMOLLM2 = KVLayout(layers=30, kv_heads=3, head_dim=64, dtype=torch.bfloat16, chunk_size=256)  # three values a chunk


@dataclass(frozen=True)
class Chunk:
    record: ChunkRecord
    tokens: bytes
    payload: torch.Tensor
    kv: torch.Tensor  # the payload as [layers, 2, kv_heads, n_tokens, head_dim]


def make_chunk(layout: KVLayout, seed: int = 0, n_tokens: int | None = None, identity: bytes = IDENTITY) -> Chunk:
    n = layout.chunk_size if n_tokens is None else n_tokens
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.layers, 2, layout.kv_heads, n, layout.head_dim)
    kv = torch.randn(shape, generator=generator).to(layout.dtype)
    tokens = encode_tokens([seed * 1000 + i for i in range(n)])
    parent = root_key(identity, "")
    record = ChunkRecord(chunk_key(parent, tokens), parent, identity, n, depth=0)
    return Chunk(record, tokens, kv.reshape(-1).view(torch.uint8), kv)


def arena_target(layout: KVLayout, n_tokens: int) -> torch.Tensor:
    """A strided slice of a zeroed arena, as the engine hands it out."""
    arena = torch.zeros(layout.layers, 2, layout.kv_heads, 3 * layout.chunk_size, layout.head_dim, dtype=layout.dtype)
    return arena[:, :, :, layout.chunk_size : layout.chunk_size + n_tokens]
