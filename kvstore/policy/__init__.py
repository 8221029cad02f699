"""Eviction policies by config name."""

from kvstore.policy.base import Chunk, EvictionPolicy
from kvstore.policy.fifo import Fifo
from kvstore.policy.gdsf import Gdsf
from kvstore.policy.importance_score import ImportanceScore
from kvstore.policy.impress import Impress
from kvstore.policy.lfu import Lfu
from kvstore.policy.lru import Lru
from kvstore.policy.s3fifo import S3Fifo
from kvstore.policy.tlru import TailLru

_ALL: tuple[type[EvictionPolicy], ...] = (ImportanceScore, Impress, Lru, Lfu, Fifo, S3Fifo, TailLru, Gdsf)

POLICIES: dict[str, type[EvictionPolicy]] = {policy.name: policy for policy in _ALL}


def make_policy(name: str) -> EvictionPolicy:
    """A fresh policy. Raises ValueError for an unknown name."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise ValueError(f"unknown eviction policy {name!r}; there are {', '.join(POLICIES)}") from None


__all__ = ["POLICIES", "Chunk", "EvictionPolicy", "make_policy"]
