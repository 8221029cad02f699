"""Work on a store folder while no server uses it: what is there, is it whole, export and import.

Everything here reads LMDB alone: no model is loaded, and chunks of any identity are understood, since each stored
value says of itself what it is.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import lmdb
import xxhash

from kvstore.chunk import HEADER_BYTES, ChunkHeader
from kvstore.keys import KEY_BYTES, TOKEN_BYTES
from kvstore.tiers.base import IntegrityError
from kvstore.tiers.disk_env import DiskEnvironment, DiskUnavailable
from kvstore.tiers.disk_rows import ChunkRow

_MAGIC = b"KVEXPORT1\n"
_LENGTH = struct.Struct("<Q")
_GROUP = struct.Struct(">H")
_SLACK = 64 * 2**20
_MAX_FIELD = 2**31


class ExportError(Exception):
    """An export file that can't be used here; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A chunk that would be a miss: its key in hex, the cause as in ``IntegrityError``, and the detail."""

    key: str
    cause: str
    detail: str


@dataclass(slots=True)
class FolderStats:
    chunks: int = 0
    tokens: int = 0
    stored_bytes: int = 0  # values in whole pages
    file_bytes: int = 0
    identities: dict[str, int] = field(default_factory=dict)  # chunks by identity digest, hex
    pinned_prefixes: int = 0


class StoreFolder:
    """An exclusively opened store folder; a context manager.

    Raises StoreInUse while a server has it, DiskUnavailable when there is no store.
    """

    def __init__(self, directory: Path, room: int = 0) -> None:
        folder = directory.expanduser()
        data = folder / "data.mdb"
        if not data.exists():
            raise DiskUnavailable(f"{folder} holds no store; see [prefix_cache].disk_cache_dir in your config.toml")
        self._env = DiskEnvironment(folder, data.stat().st_size + room + _SLACK, durable=False)
        self._data = data

    def __enter__(self) -> StoreFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._env.close()

    def stats(self) -> FolderStats:
        stats = FolderStats(file_bytes=self._data.stat().st_blocks * 512)
        counts: Counter[str] = Counter()
        for row in self.rows():
            stats.chunks += 1
            stats.tokens += row.record.n_tokens
            stats.stored_bytes += row.stored_bytes
            counts[row.record.identity.hex()] += 1
        stats.identities = dict(counts)
        with self._env.read() as txn:
            stats.pinned_prefixes = int(txn.stat(self._env.db(b"pins"))["entries"])
        return stats

    def identities(self) -> dict[bytes, dict[str, str]]:
        """Named parts by identity digest."""
        with self._env.read() as txn:
            return {bytes(k): json.loads(bytes(v)) for k, v in txn.cursor(db=self._env.db(b"meta"))}

    def rows(self) -> list[ChunkRow]:
        """All readable rows, parents before children."""
        with self._env.read() as txn:
            raw = [(bytes(k), bytes(v)) for k, v in txn.cursor(db=self._env.db(b"chunks"))]
        rows = (ChunkRow.unpack(key, row) for key, row in raw)
        return sorted((row for row in rows if row is not None), key=lambda row: row.record.depth)

    def keys(self) -> list[bytes]:
        """Keys of all rows, readable or not."""
        with self._env.read() as txn:
            return [bytes(key) for key in txn.cursor(db=self._env.db(b"chunks")).iternext(values=False)]

    def verify(self) -> Iterator[Fault | None]:
        """Check every stored chunk as a load would: one item each, None for a good one."""
        groups: Counter[tuple[bytes, int]] = Counter()
        counted: dict[bytes, tuple[bytes, int]] = {}
        known = set(self.keys())
        for key in known:
            fault, identity, n_groups = self._verify_chunk(key, known)
            if fault is None:
                groups[identity, n_groups] += 1
                counted[key] = (identity, n_groups)
            yield fault
        # How many values a chunk has is the model's affair; within one identity all have the same.
        usual = {identity: n for (identity, n), _ in sorted(groups.items(), key=lambda item: item[1])}
        for key, (identity, n_groups) in counted.items():
            if n_groups != usual[identity]:
                yield Fault(key.hex(), "missing", f"{n_groups} values instead of {usual[identity]}")

    def _verify_chunk(self, key: bytes, known: Collection[bytes]) -> tuple[Fault | None, bytes, int]:
        try:
            with self._env.read() as txn:
                packed = txn.get(key, db=self._env.db(b"chunks"))
                row = None if packed is None else ChunkRow.unpack(key, bytes(packed))
                if row is None:
                    raise IntegrityError("header", "damaged row")
                if row.record.depth and row.record.parent not in known:
                    raise IntegrityError("missing", "its parent is not in the store")
                return None, row.record.identity, self._verify_values(txn, row)
        except IntegrityError as error:
            return Fault(key.hex(), error.cause, str(error)), b"", 0
        except lmdb.Error as error:
            return Fault(key.hex(), "io", str(error)), b"", 0

    def _verify_values(self, txn: lmdb.Transaction[memoryview], row: ChunkRow) -> int:
        record = row.record
        tokens = txn.get(record.key, db=self._env.db(b"tokens"))
        if tokens is None:
            raise IntegrityError("missing", "token ids are not on disk")
        if len(tokens) != record.n_tokens * TOKEN_BYTES:
            raise IntegrityError("tokens", "wrong number of token ids")
        tokens_sum = xxhash.xxh3_64_intdigest(tokens)
        values = list(self._values(txn, record.key))
        if not values:
            raise IntegrityError("missing", "no values")
        for index, (group, value) in enumerate(values):
            header = ChunkHeader.unpack(value)
            said = (header.key, header.parent, header.identity, header.n_tokens, header.group)
            if said != (record.key, record.parent, record.identity, record.n_tokens, group) or group != index:
                raise IntegrityError("header", f"value {index} is not the chunk's")
            if header.tokens_sum != tokens_sum:
                raise IntegrityError("tokens", "token ids are not those of the stored chunk")
            if header.payload_bytes != len(value) - HEADER_BYTES:
                raise IntegrityError("length", f"value {index} is cut short")
            if xxhash.xxh3_64_intdigest(value[HEADER_BYTES:]) != header.payload_sum:
                raise IntegrityError("checksum", f"payload of group {index} does not match its checksum")
        return len(values)

    def _values(self, txn: lmdb.Transaction[memoryview], key: bytes) -> Iterator[tuple[int, memoryview]]:
        cursor = txn.cursor(db=self._env.db(b"values"))
        found = cursor.set_range(key)
        while found:
            name = bytes(cursor.key())
            if name[:KEY_BYTES] != key:
                return
            yield _GROUP.unpack(name[KEY_BYTES:])[0], cursor.value()
            found = cursor.next()

    def drop(self, keys: Collection[bytes]) -> int:
        """Delete chunks and all that hang from them; returns how many went."""
        doomed = set(keys)
        for row in self.rows():  # parents come first
            if row.record.parent in doomed:
                doomed.add(row.record.key)
        for key in doomed:
            with self._env.write() as txn:
                with txn.cursor(db=self._env.db(b"values")) as cursor:
                    found = cursor.set_range(key)
                    while found and bytes(cursor.key())[:KEY_BYTES] == key:
                        found = cursor.delete()
                txn.delete(key, db=self._env.db(b"tokens"))
                txn.delete(key, db=self._env.db(b"chunks"))
        return len(doomed)

    def clear(self) -> None:
        """Delete everything, and give the space back to the file system."""
        self._env.reopen(empty=True)

    # Export and import ----------------------------------------------------------------------------------------

    def export(self, file: BinaryIO, identity: bytes, keys: Collection[bytes] | None = None) -> Iterator[int]:
        """Write chunks of one identity, parents first: all, or ``keys``. Yields the tokens of each."""
        file.write(_MAGIC)
        parts = self.identities().get(identity, {})
        _write(file, json.dumps({"identity": identity.hex(), "parts": parts}).encode())
        for row in self.rows():
            if row.record.identity != identity or (keys is not None and row.record.key not in keys):
                continue
            with self._env.read() as txn:
                self._verify_values(txn, row)
                values = list(self._values(txn, row.record.key))
                tokens = txn.get(row.record.key, db=self._env.db(b"tokens"))
                for piece in (row.record.key, row.pack(), tokens, _LENGTH.pack(len(values))):
                    _write(file, piece or b"")
                for _, value in values:
                    _write(file, value)
            yield row.record.n_tokens

    def load(self, file: BinaryIO, capacity_bytes: int) -> Iterator[int]:
        """Take in what ``export`` wrote. Yields the tokens of each chunk stored.

        Every chunk is verified before it is committed, and one whose parent isn't here is refused. What fits
        ``capacity_bytes`` in all is taken.

        Raises ExportError: another identity, a damaged file, or no more room.
        """
        identity = self._check_head(file)
        known = set(self.keys())
        used = sum(row.stored_bytes for row in self.rows())
        while (key := _read(file, allow_end=True)) is not None:
            packed, tokens, count = _read(file), _read(file), _LENGTH.unpack(_read(file) or b"")[0]
            values = [_read(file) for _ in range(count)]
            row = ChunkRow.unpack(key, packed or b"")
            if row is None or row.record.identity != identity:
                raise ExportError("the file is damaged: a chunk's record does not verify; export it again")
            if key in known:
                continue
            used += row.stored_bytes
            if used > capacity_bytes:
                raise ExportError(
                    f"the store is full: its cap is {capacity_bytes} bytes; raise [prefix_cache].disk_cache_gb"
                )
            try:
                with self._env.write() as txn:
                    for group, value in enumerate(values):
                        txn.put(key + _GROUP.pack(group), value or b"", db=self._env.db(b"values"))
                    txn.put(key, tokens or b"", db=self._env.db(b"tokens"))
                    txn.put(key, row.pack(), db=self._env.db(b"chunks"))
                    if row.record.depth and row.record.parent not in known:
                        raise IntegrityError("missing", "its parent is not in the store")
            except (IntegrityError, lmdb.Error) as error:
                raise ExportError(f"a chunk could not be taken in: {error}") from error
            fault, _, _ = self._verify_chunk(key, known | {key})
            if fault is not None:
                self.drop([key])
                raise ExportError(f"the file is damaged ({fault.detail}); what came before it is kept. Export it again")
            known.add(key)
            yield row.record.n_tokens

    def _check_head(self, file: BinaryIO) -> bytes:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ExportError("not an export of kvgate; make one with `kvgate cache export`")
        try:
            head = json.loads(_read(file) or b"")
            identity, theirs = bytes.fromhex(head["identity"]), dict(head["parts"])
        except (ValueError, KeyError, TypeError):
            raise ExportError("the file is damaged: its head can't be read; export it again") from None
        ours = self.identities()
        if identity not in ours:
            raise ExportError(
                f"the file is of another identity{_differences(ours, theirs)}; serve the same model first"
            )
        return identity


def _differences(ours: Mapping[bytes, Mapping[str, str]], theirs: Mapping[str, str]) -> str:
    """Which parts differ from the most alike identity here."""
    differing: list[list[str]] = [
        [name for name in parts if parts.get(name) != theirs.get(name)] for parts in ours.values() if parts
    ]
    fewest = min(differing, key=lambda names: len(names), default=[])
    return f" (differs in: {', '.join(fewest)})" if fewest else ""


def _write(file: BinaryIO, piece: bytes | memoryview) -> None:
    file.write(_LENGTH.pack(len(piece)))
    file.write(piece)


def _read(file: BinaryIO, *, allow_end: bool = False) -> bytes | None:
    head = file.read(_LENGTH.size)
    if not head and allow_end:
        return None
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else _MAX_FIELD
    piece = file.read(length) if length < _MAX_FIELD else b""
    if length >= _MAX_FIELD or len(piece) != length:
        raise ExportError("the file ends in the middle or is damaged; export it again")
    return piece
