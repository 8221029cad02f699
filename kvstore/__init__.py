"""A tiered cache of prefix KV: device arena, host memory, LMDB on disk. Usable without the gateway."""

from kvstore.layout import KVLayout
from kvstore.store import Lease, Match, PrefixStore
from kvstore.tiers.device import DeviceArena
from kvstore.tiers.disk import DiskTier, DiskUnavailable, StoreInUse
from kvstore.tiers.host import HostTier

__all__ = [
    "DeviceArena",
    "DiskTier",
    "DiskUnavailable",
    "HostTier",
    "KVLayout",
    "Lease",
    "Match",
    "PrefixStore",
    "StoreInUse",
]
