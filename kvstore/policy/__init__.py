"""Eviction policies by config name."""

from kvstore.policy.base import EvictionPolicy
from kvstore.policy.importance_score import ImportanceScore
from kvstore.policy.lfu import Lfu
from kvstore.policy.lru import Lru

POLICIES: dict[str, type[EvictionPolicy]] = {policy.name: policy for policy in (ImportanceScore, Lru, Lfu)}


def make_policy(name: str) -> EvictionPolicy:
    """A fresh policy. Raises ValueError for an unknown name."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise ValueError(f"unknown eviction policy {name!r}; there are {', '.join(POLICIES)}") from None


__all__ = ["POLICIES", "EvictionPolicy", "make_policy"]
