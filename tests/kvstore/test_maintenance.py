"""The store folder without a server: counts, verification, repair, export and import."""

from __future__ import annotations

import io
from pathlib import Path

import lmdb
import pytest

from kvstore import StoreInUse
from kvstore.keys import prompt_keys
from kvstore.maintenance import ExportError, StoreFolder
from kvstore.tiers.disk_env import DiskUnavailable

from .test_store import CHUNK, IDENTITY, Make, ids, make, run

__all__ = ["make"]


def filled(make: Make, tmp_path: Path, folder: str = "store") -> Path:
    store = make(folder=folder)
    run(store, ids(1, 3 * CHUNK))
    run(store, [*ids(1, CHUNK), *ids(2, 2 * CHUNK + 5)])
    store.pin(ids(1, 3 * CHUNK))
    assert store.flush(20)
    make(folder="elsewhere")  # closes the first
    return tmp_path / folder


def damage(folder: Path, key: bytes) -> None:
    """Flip one bit in the middle of a stored value, past LMDB."""
    with lmdb.open(str(folder), max_dbs=8, map_size=1 << 24) as env, env.begin(write=True) as txn:
        values = env.open_db(b"values", txn)
        name = key + b"\0\0"
        value = bytearray(txn.get(name, db=values))
        value[len(value) // 2] ^= 4
        txn.put(name, bytes(value), db=values)


def test_stats_count_what_is_there(make: Make, tmp_path: Path) -> None:
    with StoreFolder(filled(make, tmp_path)) as folder:
        stats = folder.stats()
    assert (stats.chunks, stats.tokens) == (6, 3 * CHUNK + 2 * CHUNK + 5)
    assert stats.identities == {IDENTITY.hex(): 6}
    assert stats.pinned_prefixes == 1
    assert 0 < stats.stored_bytes <= stats.file_bytes


def test_a_folder_in_use_or_without_a_store_is_refused(make: Make, tmp_path: Path) -> None:
    make()
    with pytest.raises(StoreInUse, match="in use by process"):
        StoreFolder(tmp_path / "store")
    with pytest.raises(DiskUnavailable, match="disk_cache_dir"):
        StoreFolder(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_verify_finds_the_one_bad_chunk_and_repair_drops_what_hangs_from_it(make: Make, tmp_path: Path) -> None:
    path = filled(make, tmp_path)
    with StoreFolder(path) as folder:
        assert [fault for fault in folder.verify() if fault] == []
        first = next(
            row.record.key for row in folder.rows() if row.record.depth == 1 and _has_child(folder, row.record.key)
        )
    damage(path, first)
    with StoreFolder(path) as folder:
        (fault,) = [fault for fault in folder.verify() if fault]
        assert (fault.key, fault.cause) == (first.hex(), "checksum")
        assert folder.drop([first]) in (2, 3), "itself and the one or two chunks below it"
        assert [fault for fault in folder.verify() if fault] == []
    store = make()
    assert store.match([*ids(1, CHUNK), *ids(2, CHUNK)]).n_tokens >= CHUNK
    assert run(store, ids(1, 3 * CHUNK)).hit_tokens >= CHUNK


def _has_child(folder: StoreFolder, key: bytes) -> bool:
    return any(row.record.parent == key for row in folder.rows())


def test_a_missing_value_and_a_damaged_row_are_faults(make: Make, tmp_path: Path) -> None:
    path = filled(make, tmp_path)
    with StoreFolder(path) as folder:
        leaf, other = [row.record.key for row in folder.rows()][-2:]
    with lmdb.open(str(path), max_dbs=8, map_size=1 << 24) as env, env.begin(write=True) as txn:
        txn.delete(leaf + b"\0\0", db=env.open_db(b"values", txn))
        txn.put(other, b"nonsense", db=env.open_db(b"chunks", txn))
    with StoreFolder(path) as folder:
        causes = {fault.key: fault.cause for fault in folder.verify() if fault}
    assert causes[leaf.hex()] in ("missing", "header") and causes[other.hex()] == "header"


def test_clear_empties_the_file(make: Make, tmp_path: Path) -> None:
    path = filled(make, tmp_path)
    with StoreFolder(path) as folder:
        before = folder.stats().file_bytes
        folder.clear()
        assert folder.stats().chunks == 0 and folder.stats().file_bytes < before
    assert make().match(ids(1, CHUNK)).n_tokens == 0


def test_a_prefix_moves_to_another_store(make: Make, tmp_path: Path) -> None:
    path = filled(make, tmp_path)
    file = io.BytesIO()
    keys = prompt_keys(IDENTITY, "", [*ids(1, CHUNK), *ids(2, 2 * CHUNK + 5)], CHUNK)
    with StoreFolder(path) as folder:
        assert sum(folder.export(file, IDENTITY, keys)) == 3 * CHUNK + 5
    make(folder="target")  # a server of the same model has been here
    make(folder="elsewhere")
    file.seek(0)
    with StoreFolder(tmp_path / "target", room=1 << 20) as folder:
        assert sum(folder.load(file, 1 << 30)) == 3 * CHUNK + 5
        assert [fault for fault in folder.verify() if fault] == []
    store = make(folder="target")
    prompt = [*ids(1, CHUNK), *ids(2, 2 * CHUNK + 5), 9]
    assert run(store, prompt).hit_tokens == 3 * CHUNK + 5, "and the bytes are right: run checks them"
    assert store.match(ids(1, 3 * CHUNK)).n_tokens == CHUNK, "the other prefix was not exported"


def test_import_refuses_another_identity_damage_and_too_much(make: Make, tmp_path: Path) -> None:
    path = filled(make, tmp_path)
    file = io.BytesIO()
    with StoreFolder(path) as folder:
        list(folder.export(file, IDENTITY))
    make(folder="other", identity=bytes(32))
    make(folder="target")
    make(folder="elsewhere")
    with StoreFolder(tmp_path / "other", room=1 << 20) as folder, pytest.raises(ExportError, match="another identity"):
        list(folder.load(io.BytesIO(file.getvalue()), 1 << 30))
    with StoreFolder(tmp_path / "target", room=1 << 20) as folder:
        with pytest.raises(ExportError, match="cap is"):
            list(folder.load(io.BytesIO(file.getvalue()), 10_000))
        with pytest.raises(ExportError, match=r"ends in the middle|damaged"):
            list(folder.load(io.BytesIO(file.getvalue()[:-100]), 1 << 30))
        bent = bytearray(file.getvalue())
        bent[-2000] ^= 1
        with pytest.raises(ExportError, match="damaged"):
            list(folder.load(io.BytesIO(bytes(bent)), 1 << 30))
        with pytest.raises(ExportError, match="not an export"):
            list(folder.load(io.BytesIO(b"something else"), 1 << 30))
        assert [fault for fault in folder.verify() if fault] == [], "whatever was refused left nothing bad"
