"""Memory facts for metrics, and allocator settings that keep the process's memory flat."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable

import psutil
import torch

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MMAP_THRESHOLD_MAX = 32 << 20  # glibc refuses more on 64-bit

#: Compiled kernels that oneDNN, and torch's own layer over it, may keep. Each holds half a MiB (measured: 700 row
#: counts of one linear 370 MiB with their default of 1,024 each), and a model needs about five a row count.
_KERNELS_KEPT = "160"


def tune_allocator() -> None:
    """Bound the kernel caches, and keep activations on the heap between steps (glibc only).

    The caches take their bound with the first product, so this comes before it. By default each large temporary is
    mapped and unmapped, and its pages are faulted in anew: measured here, ``exp`` over a fresh 37 MB tensor takes six
    times as long as over a reused one. All threads share one heap: with one each, what a thread freed serves no
    other, and the heaps of loaders, writer and workers fill up one by one.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, _KERNELS_KEPT)
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


class HeapTrim:
    """Gives the free parts of the heap back to the system now and then (glibc only; else it does nothing).

    Small objects that live long come to lie between the activations of past steps, whose room then serves no larger
    one, so the heap grows for hours. A trim takes milliseconds, and what it gave back must be faulted in again: it is
    for moments when nobody waits, and under load for once a minute.
    """

    IDLE_SECONDS = 10.0
    BUSY_SECONDS = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        try:
            self._trim = ctypes.CDLL(None).malloc_trim if sys.platform.startswith("linux") else None
        except (OSError, AttributeError):
            self._trim = None

    def trim_if_due(self, *, idle: bool) -> bool:
        """True when it trimmed."""
        now = self._clock()
        if self._trim is None or now - self._last < (self.IDLE_SECONDS if idle else self.BUSY_SECONDS):
            return False
        self._last = now
        self._trim(0)
        log.debug("free heap given back in %.1f ms", (self._clock() - now) * 1e3)
        return True


def device_memory(device: torch.device, arena_bytes: int, model_bytes: int) -> dict[str, int]:
    """Bytes by kind: ``allocated``, ``reserved``, ``total`` of the device, and the KV ``arena`` in it."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "total": total,
            "arena": arena_bytes,
        }
    return {
        "allocated": model_bytes + arena_bytes,
        "reserved": psutil.Process().memory_info().rss,
        "total": psutil.virtual_memory().total,
        "arena": arena_bytes,
    }


def arena_pages(
    device: torch.device, *, chunk_bytes: int, device_cache_gb: float, gpu_memory_utilization: float
) -> int:
    """Pages the arena gets: from ``gpu_memory_utilization`` on CUDA, from ``device_cache_gb`` elsewhere."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(total * gpu_memory_utilization) - (total - free)
    else:
        budget = int(device_cache_gb * 1024**3)
    return max(0, budget // chunk_bytes)
