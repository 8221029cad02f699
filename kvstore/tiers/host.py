"""The host tier: whole chunks in preallocated memory."""

from __future__ import annotations

import logging
import mmap
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from kvstore.chunk import Bytes, check_put, check_target, copy_group, group_spans, verify_record
from kvstore.layout import KVLayout
from kvstore.tiers.base import ChunkRecord, ChunkStats, IntegrityError, PutOutcome, TierName, TierUsage

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    slab: int
    memory: Bytes  # the slab's bytes; keeps the mapping alive while the entry is read
    record: ChunkRecord
    tokens: bytes
    checksum: int  # xxh3-64 of the payload
    readers: int = 0
    retired: bool = False  # dropped or replaced: the last reader frees the slab


class HostTier:
    """Chunks in host memory, one slab each. Thread-safe; payloads are copied outside the lock.

    Slabs are cut from one anonymous mapping made at construction, so the tier never allocates afterwards and
    never holds more than ``capacity_bytes``. With CUDA the mapping is page-locked. The tier has no policy: when
    no slab is free ``put`` returns FULL and the caller drops something.

    Raises MemoryError when the mapping cannot be made.
    """

    name: TierName = TierName.CPU

    def __init__(self, layout: KVLayout, capacity_bytes: int) -> None:
        self._layout = layout
        self._capacity = capacity_bytes
        self._slab_bytes = -(-layout.chunk_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        slabs = capacity_bytes // self._slab_bytes
        self._region = _reserve(slabs * self._slab_bytes)
        self._pinned = _pin(self._region)
        self._free: deque[int] = deque(range(slabs))
        self._slabs = slabs
        self._entries: dict[bytes, _Entry] = {}
        self._lock = threading.Lock()

    def prefault(self) -> None:
        """Touch every free slab once, so that resident memory is flat and first copies run at full speed."""
        for _ in range(self._slabs):
            with self._lock:
                if not self._free:
                    return
                slab = self._free.popleft()  # taken while touched: a put must not write it meanwhile
                memory = self._memory(slab)
            memory.fill(0)
            with self._lock:
                self._free.append(slab)

    def has(self, key: bytes) -> bool:
        return key in self._entries

    def put(self, record: ChunkRecord, tokens: bytes, payload: torch.Tensor, stats: ChunkStats) -> PutOutcome:
        source = check_put(self._layout, record, tokens, payload)
        if not self._slabs:
            return PutOutcome.OVERSIZE
        with self._lock:
            slab = self._take_slab(record.key)
            if slab is None:
                return PutOutcome.FULL
            memory = self._memory(slab)
        np.copyto(memory[: source.size], source)
        checksum = xxhash.xxh3_64_intdigest(source.data)
        entry = _Entry(slab, memory, record, tokens, checksum)
        with self._lock:
            self._retire(record.key)
            self._entries[record.key] = entry
        return PutOutcome.STORED

    def get_into(self, record: ChunkRecord, tokens: bytes, target: torch.Tensor, n_tokens: int) -> None:
        check_target(self._layout, record, target, n_tokens)
        with self._reading(record.key) as entry:
            verify_record(entry.record, record)
            if entry.tokens != tokens:
                raise IntegrityError("tokens", "token ids are not those of the stored chunk")
            checksum = xxhash.xxh3_64()
            for span in group_spans(self._layout, record.n_tokens):
                part = entry.memory[span.start : span.stop]
                copy_group(self._layout, part, record.n_tokens, target, span, checksum)
            if checksum.intdigest() != entry.checksum:
                raise IntegrityError("checksum", "payload in host memory does not match its checksum")

    def drop(self, key: bytes) -> None:
        with self._lock:
            self._retire(key)

    def usage(self) -> TierUsage:
        with self._lock:
            taken = self._slabs - len(self._free)
            return TierUsage(self._capacity, taken * self._slab_bytes, len(self._entries))

    def close(self) -> None:
        """Forget everything and give the memory back as soon as the last reader is done."""
        with self._lock:
            self._entries.clear()
            self._free.clear()
            self._slabs = 0
            region, self._region = self._region, torch.empty(0, dtype=torch.uint8)
            if self._pinned:
                torch.cuda.cudart().cudaHostUnregister(region.data_ptr())  # type: ignore[no-untyped-call]
                self._pinned = False

    def _memory(self, slab: int) -> Bytes:
        start = slab * self._slab_bytes
        array: Bytes = self._region[start : start + self._slab_bytes].numpy()
        return array

    def _take_slab(self, key: bytes) -> int | None:
        """A slab that nobody else uses; in a full tier the idle older copy of the same key gives up its own."""
        if not self._free and (old := self._entries.get(key)) is not None and not old.readers:
            self._retire(key)
        return self._free.pop() if self._free else None

    def _retire(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        entry.retired = True
        if not entry.readers:
            self._free.append(entry.slab)

    @contextmanager
    def _reading(self, key: bytes) -> Iterator[_Entry]:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                raise IntegrityError("missing", "not in host memory")
            entry.readers += 1
        try:
            yield entry
        finally:
            with self._lock:
                entry.readers -= 1
                if entry.retired and not entry.readers:
                    self._free.append(entry.slab)


def _reserve(size: int) -> torch.Tensor:
    """A flat uint8 tensor over fresh anonymous memory, in huge pages where the system has them."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot reserve {size / 2**30:.1f} GiB for the host tier; give it less: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # a kernel built without them
            _log.debug("no huge pages for the host tier: %s", error)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin(region: torch.Tensor) -> bool:
    """Page-lock the memory for fast device copies. torch's own pinned allocator would round up to a power of 2."""
    if not region.numel() or not torch.cuda.is_available():
        return False
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = cudart.cudaHostRegister(region.data_ptr(), region.numel(), 0)
    if int(result) != 0:
        _log.warning("host tier memory could not be page-locked (CUDA error %d): copies will be slower", int(result))
        return False
    return True
