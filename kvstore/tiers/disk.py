"""The disk tier: chunks in LMDB, verified on every read, alive after a restart."""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import lmdb
import numpy as np
import torch
import xxhash

from kvstore.chunk import (
    HEADER_BYTES,
    Bytes,
    ChunkHeader,
    GroupSpan,
    check_put,
    check_target,
    group_spans,
    load_group,
)
from kvstore.layout import KVLayout
from kvstore.tiers.base import ChunkRecord, ChunkStats, IntegrityError, PutOutcome, TierName, TierUsage
from kvstore.tiers.disk_env import DiskEnvironment, DiskUnavailable, StoreInUse, unavailable, unmap_pages
from kvstore.tiers.disk_health import WriteHealth
from kvstore.tiers.disk_rows import ChunkRow

__all__ = ["DiskTier", "DiskUnavailable", "StoreInUse"]

MIN_FREE_BYTES = 256 * 1024 * 1024
RETRY_SECONDS = 5.0

_LMDB_VALUE_HEAD = 16  # LMDB's own bytes before a value that has pages of its own
_GROUP = struct.Struct(">H")  # big-endian: a chunk's values are neighbours, in order
_EXPIRY = struct.Struct("<d")
_MAP_FULL_BUDGET = 0.9
_MAP_SLACK = 16 * 1024 * 1024  # tree pages, and the copy-on-write of small stores

_log = logging.getLogger(__name__)


class DiskTier:
    """Chunks in one LMDB environment. Thread-safe: reads run side by side, writes one after the other.

    ``identity`` is the digest of what this process stores and may load. Chunks of other identities stay in the
    folder, count and can be dropped, but are never loaded. ``capacity_bytes`` bounds the values in whole pages;
    the file itself grows to at most 1.5 times that (plus 16 MiB) and never shrinks but by ``clear``. The tier has
    no policy: above the cap ``put`` returns FULL and the caller drops something.

    A write that fails makes the tier read-only until a later one works; see ``usage().detail``. ``durable`` syncs
    every commit. ``clock`` is in seconds and only times the retries.

    Raises StoreInUse when another process has the folder, DiskUnavailable when it cannot be used.
    """

    name: TierName = TierName.DISK

    def __init__(
        self,
        layout: KVLayout,
        directory: str | Path,
        capacity_bytes: int,
        *,
        identity: bytes,
        identity_parts: Mapping[str, str] | None = None,
        durable: bool = False,
        min_free_bytes: int = MIN_FREE_BYTES,
        retry_seconds: float = RETRY_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._layout = layout
        self._identity = identity
        self._identity_parts = json.dumps(dict(identity_parts or {})).encode()
        self._capacity = capacity_bytes
        self._budget = capacity_bytes  # less than the capacity after the map was too fragmented to use it all
        folder = Path(directory).expanduser()
        self._env = DiskEnvironment(folder, max(capacity_bytes * 3 // 2, capacity_bytes + _MAP_SLACK), durable)
        self._health = WriteHealth(folder, min_free_bytes, retry_seconds, clock)
        self._write_lock = threading.RLock()
        self._counter_lock = threading.Lock()
        self._sizes: dict[bytes, int] = {}  # stored bytes of every chunk that can be asked for
        self._doomed: dict[bytes, int] = {}  # dropped, but not yet gone from the file
        self._used = 0  # of both
        self._found_identities: set[bytes] = set()  # of the chunks that were here at the start
        #: Since the start: header and payload bytes of what was loaded and stored, and the time it took.
        self.read_bytes = self.write_bytes = 0
        self.read_seconds = self.write_seconds = 0.0
        largest = max(span.payload_bytes for span in group_spans(layout, layout.chunk_size))
        self._buffer: Bytes = np.zeros(HEADER_BYTES + largest, np.uint8)  # under the write lock
        try:
            self._page_bytes = self._env.page_bytes
            self._load()
        except lmdb.Error as error:
            self._env.close()
            raise unavailable(folder, error) from error
        self._remember_identity()

    @property
    def unclean(self) -> bool:
        """The last process that used the folder did not close it."""
        return self._env.unclean

    def usage(self) -> TierUsage:
        detail = self._health.detail
        return TierUsage(self._capacity, self._used, len(self._sizes), bool(detail), detail)

    def stored_bytes(self, n_tokens: int) -> int:
        """What a chunk of ``n_tokens`` takes of the capacity: header and payload of each value, in whole pages."""
        page = self._page_bytes
        sizes = (_LMDB_VALUE_HEAD + HEADER_BYTES + s.payload_bytes for s in group_spans(self._layout, n_tokens))
        return sum(-(-size // page) * page for size in sizes)

    # -- reading -----------------------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        return key in self._sizes

    def get_into(self, record: ChunkRecord, tokens: bytes, target: torch.Tensor, n_tokens: int) -> None:
        check_target(self._layout, record, target, n_tokens)
        if record.key not in self._sizes:
            raise IntegrityError("missing", "not on disk")
        if record.identity != self._identity:
            raise IntegrityError("identity", "stored by another model, dtype, tokenizer or layout")
        started = time.perf_counter()
        try:
            self._copy_verified(record, tokens, target)
        except lmdb.Error as error:
            raise IntegrityError("io", str(error)) from error
        with self._counter_lock:
            self.read_bytes += self._value_bytes(record.n_tokens)
            self.read_seconds += time.perf_counter() - started

    def tokens(self, key: bytes) -> bytes | None:
        """The token bytes stored with a chunk; None when unknown or unreadable."""
        if key not in self._sizes:
            return None
        try:
            with self._env.read() as txn:
                found = txn.get(key, db=self._env.db(b"tokens"))
                return None if found is None else bytes(found)
        except lmdb.Error as error:
            _log.warning("disk cache: token ids could not be read: %s", error)
            return None

    def records(self) -> Iterator[tuple[ChunkRecord, ChunkStats, int]]:
        """Record, stats and stored bytes of every chunk, of all identities, from the metadata alone.

        The rows are read before the first one is handed out, so that a slow caller holds no transaction open.
        Raises lmdb.Error.
        """
        rows = [row for _, row in self._rows() if row is not None and row.record.key in self._sizes]
        return ((row.record, row.stats, row.stored_bytes) for row in rows)

    def identities(self) -> dict[bytes, dict[str, str]]:
        """The named parts of every identity that ever stored here, by digest (see ``Identity.parts``)."""
        with self._env.read() as txn:
            rows = [(bytes(k), bytes(v)) for k, v in txn.cursor(db=self._env.db(b"meta"))]
        return {key: json.loads(value) for key, value in rows}

    def _copy_verified(self, record: ChunkRecord, tokens: bytes, target: torch.Tensor) -> None:
        """Verify and copy value by value inside one read transaction: the bytes are still cached for the copy."""
        tokens_sum = xxhash.xxh3_64_intdigest(tokens)
        with self._env.read() as txn:
            stored = txn.get(record.key, db=self._env.db(b"tokens"))
            if stored is None:
                raise IntegrityError("missing", "token ids are not on disk")
            if stored != tokens:
                raise IntegrityError("tokens", "token ids are not those of the stored chunk")
            for span in group_spans(self._layout, record.n_tokens):
                value = txn.get(_value_key(record.key, span.index), db=self._env.db(b"values"))
                if value is None:
                    raise IntegrityError("missing", f"value of group {span.index} is not on disk")
                load_group(self._layout, value, record, tokens_sum, span, target)
                unmap_pages(np.frombuffer(value, np.uint8))

    # -- writing -----------------------------------------------------------------------------------------------

    def put(self, record: ChunkRecord, tokens: bytes, payload: torch.Tensor, stats: ChunkStats) -> PutOutcome:
        source = check_put(self._layout, record, tokens, payload)
        if record.identity != self._identity:
            raise ValueError("the record's identity is not the tier's")
        size = self.stored_bytes(record.n_tokens)
        if size > self._capacity:
            return PutOutcome.OVERSIZE
        with self._write_lock:
            if not self._attached() or not self._health.may_write() or not self._delete_doomed():
                return PutOutcome.READ_ONLY
            # LMDB reuses the pages of a drop only in the second transaction after it: with no room to grow, a
            # retry needs this small one in between.
            if self._health.detail and not self._transact(self._write_identity):
                return PutOutcome.READ_ONLY
            if self._used - self._sizes.get(record.key, 0) + size > self._budget:
                return PutOutcome.FULL
            started = time.perf_counter()
            row = ChunkRow(record, stats, size)
            if not self._transact(lambda txn: self._write_chunk(txn, row, tokens, source)):
                return PutOutcome.READ_ONLY
            self._health.succeeded()
            self._used += size - self._sizes.get(record.key, 0)
            self._sizes[record.key] = size
            with self._counter_lock:
                self.write_bytes += self._value_bytes(record.n_tokens)
                self.write_seconds += time.perf_counter() - started
        return PutOutcome.STORED

    def drop(self, key: bytes) -> None:
        self.drop_many([key])

    def drop_many(self, keys: Iterable[bytes]) -> None:
        """Forget the keys in one transaction.

        They are gone for readers at once. While the tier is read-only their bytes still count, and the next write
        that works removes them.
        """
        with self._write_lock:
            for key in keys:
                if (size := self._sizes.pop(key, None)) is not None:
                    self._doomed[key] = size
            if not self._health.waiting:
                self._delete_doomed()

    def update_stats(self, stats: Iterable[tuple[bytes, ChunkStats]]) -> None:
        """Store what policies know of these chunks, in one transaction; skipped while the tier is read-only."""
        with self._write_lock:
            known = [(key, new) for key, new in stats if key in self._sizes]
            if known and not self._health.waiting:
                self._transact(lambda txn: self._write_stats(txn, known))

    def save_pins(self, pins: Mapping[bytes, float]) -> None:
        """Replace the stored pins: end time (seconds, ``inf`` for none) by the key of the prefix's last chunk."""
        with self._write_lock:
            if not self._health.waiting:
                self._transact(lambda txn: self._write_pins(txn, pins))

    def pins(self) -> dict[bytes, float]:
        """What ``save_pins`` stored last. Raises lmdb.Error."""
        with self._env.read() as txn:
            rows = [(bytes(key), bytes(value)) for key, value in txn.cursor(db=self._env.db(b"pins"))]
        return {key: _EXPIRY.unpack(value)[0] for key, value in rows if len(value) == _EXPIRY.size}

    def clear(self) -> None:
        """Delete everything and give the space back to the file system."""
        with self._write_lock:
            self._doomed.update(self._sizes)
            self._sizes.clear()
            try:
                self._env.reopen(empty=True)
            except (lmdb.Error, OSError) as error:
                self._health.failed(str(error))
                return
            self._doomed.clear()
            self._used = 0
            self._budget = self._capacity
            self._remember_identity()

    def close(self) -> None:
        with self._write_lock:
            if not self._health.waiting:
                self._delete_doomed()
            self._env.close()

    def _attached(self) -> bool:
        """False while the store's folder or file is gone; after a while it begins anew, empty."""
        if self._env.attached or self._health.waiting:
            return True
        if not self._health.detail:
            self._health.failed("its folder or its file was removed")
            return False
        self._sizes.clear()
        self._doomed.clear()
        self._used = 0
        try:
            self._env.recreate()
        except (lmdb.Error, OSError, StoreInUse, DiskUnavailable) as error:
            self._health.failed(str(error))
            return False
        self._remember_identity()
        return True

    def _transact(self, work: Callable[[lmdb.Transaction], None]) -> bool:
        """Run one write transaction. False when it failed: then nothing of it is stored and the tier is read-only."""
        try:
            with self._env.write() as txn:
                work(txn)
        except (lmdb.Error, OSError) as error:
            if isinstance(error, lmdb.MapFullError):  # fragmented: only a smaller budget makes the caller drop
                self._budget = min(self._budget, int(self._used * _MAP_FULL_BUDGET))
            self._health.failed(str(error))
            return False
        return True

    def _write_chunk(self, txn: lmdb.Transaction, row: ChunkRow, tokens: bytes, source: Bytes) -> None:
        record = row.record
        tokens_sum = xxhash.xxh3_64_intdigest(tokens)
        for span in group_spans(self._layout, record.n_tokens):
            value = self._fill_buffer(record, span, source[span.start : span.stop], tokens_sum)
            txn.put(_value_key(record.key, span.index), value, db=self._env.db(b"values"))
        txn.put(record.key, tokens, db=self._env.db(b"tokens"))
        txn.put(record.key, row.pack(), db=self._env.db(b"chunks"))

    def _fill_buffer(self, record: ChunkRecord, span: GroupSpan, payload: Bytes, tokens_sum: int) -> memoryview:
        """Lay out one value in the reused buffer: fresh memory of this size costs more than the copy itself."""
        header = ChunkHeader(
            key=record.key,
            parent=record.parent,
            identity=record.identity,
            n_tokens=record.n_tokens,
            group=span.index,
            payload_bytes=span.payload_bytes,
            payload_sum=xxhash.xxh3_64_intdigest(payload.data),
            tokens_sum=tokens_sum,
        )
        value = self._buffer[: HEADER_BYTES + span.payload_bytes]
        value[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
        value[HEADER_BYTES:] = payload
        return value.data

    def _write_stats(self, txn: lmdb.Transaction, stats: list[tuple[bytes, ChunkStats]]) -> None:
        chunks = self._env.db(b"chunks")
        for key, new in stats:
            packed = txn.get(key, db=chunks)
            row = None if packed is None else ChunkRow.unpack(key, bytes(packed))
            if row is not None:
                txn.put(key, ChunkRow(row.record, new, row.stored_bytes).pack(), db=chunks)

    def _write_pins(self, txn: lmdb.Transaction, pins: Mapping[bytes, float]) -> None:
        database = self._env.db(b"pins")
        txn.drop(database, delete=False)
        for key, expiry in pins.items():
            txn.put(key, _EXPIRY.pack(expiry), db=database)

    def _delete_doomed(self) -> bool:
        """Remove dropped chunks from the file. False when that failed."""
        if not self._doomed:
            return True
        if not self._transact(self._delete_values):
            return False
        self._env.unmap()
        self._used -= sum(self._doomed.values())
        self._doomed.clear()
        return True

    def _delete_values(self, txn: lmdb.Transaction) -> None:
        for key in self._doomed:
            with txn.cursor(db=self._env.db(b"values")) as cursor:
                found = cursor.set_range(key)
                while found and bytes(cursor.key())[: -_GROUP.size] == key:
                    found = cursor.delete()  # moves to the next one
            txn.delete(key, db=self._env.db(b"tokens"))
            txn.delete(key, db=self._env.db(b"chunks"))

    # -- start -------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Count what is there. Damaged rows go, with their values."""
        for key, row in self._rows():
            if row is None:
                self._doomed[key] = 0
            else:
                self._sizes[key] = row.stored_bytes
                self._found_identities.add(row.record.identity)
        self._used = sum(self._sizes.values())
        if self._doomed:
            _log.warning("disk cache %s: %d damaged entries are dropped", self._env.directory, len(self._doomed))
            self._delete_doomed()

    def _rows(self) -> list[tuple[bytes, ChunkRow | None]]:
        with self._env.read() as txn:
            raw = [(bytes(key), bytes(row)) for key, row in txn.cursor(db=self._env.db(b"chunks"))]
        return [(key, ChunkRow.unpack(key, row)) for key, row in raw]

    def _remember_identity(self) -> None:
        """Keep the parts of our identity, and those of others only while chunks of theirs are here."""
        self._transact(self._write_identity)

    def _write_identity(self, txn: lmdb.Transaction) -> None:
        meta = self._env.db(b"meta")
        known = {bytes(key) for key in txn.cursor(db=meta).iternext(values=False)}
        for digest in known - self._found_identities:
            txn.delete(digest, db=meta)
        txn.put(self._identity, self._identity_parts, db=meta)

    def _value_bytes(self, n_tokens: int) -> int:
        return self._layout.payload_bytes(n_tokens) + HEADER_BYTES * len(self._layout.groups)


def _value_key(key: bytes, group: int) -> bytes:
    return key + _GROUP.pack(group)
