"""A small file system of its own: really full, remounted read-only, and a folder that is removed under the store."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvstore import DeviceArena, DiskTier, PrefixStore
from kvstore.tiers.base import TierName

from .crash_worker import CHUNK, IDENTITY, LAYOUT, prompt, serve


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(folder: Path, clock: Clock) -> PrefixStore:
    disk = DiskTier(LAYOUT, folder, 8 << 20, identity=IDENTITY, min_free_bytes=0, clock=clock)
    return PrefixStore(LAYOUT, IDENTITY, DeviceArena(LAYOUT, 16, torch.device("cpu")), disk=disk)


def store_some(store: PrefixStore, seeds: range) -> None:
    for seed in seeds:
        serve(store, prompt(seed))
        assert store.flush(20)


def test_a_full_file_system_degrades_and_recovers(small: Path) -> None:
    clock = Clock()
    store = opened(small / "store", clock)
    (small / "filler").write_bytes(b"x" * 500_000)
    store_some(store, range(120))
    usage = store.stats().usage[TierName.DISK]
    assert usage.read_only and "MiB free" in usage.detail
    assert store.stats().dropped_stores["read_only"] > 0
    assert store.stats().leases == 0
    stored = usage.chunks
    (small / "filler").unlink()
    clock.now += 10
    store_some(store, range(200, 204))
    usage = store.stats().usage[TierName.DISK]
    assert not usage.read_only and usage.chunks > stored
    store.close()
    store = opened(small / "store", clock)
    assert serve(store, [*prompt(203), 1]) == len(prompt(203))
    store.close()


def test_a_full_file_system_at_the_start_is_said(small: Path) -> None:
    from kvstore import DiskUnavailable

    (small / "filler").write_bytes(b"x" * (2 << 20))
    with pytest.raises(DiskUnavailable, match="free space"):
        opened(small / "store", Clock())


def test_a_file_system_that_turns_read_only_degrades_and_recovers(small: Path) -> None:
    clock = Clock()
    store = opened(small / "store", clock)
    store_some(store, range(3))
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=False)
    if not _is_read_only(small):
        pytest.skip("a file that is written keeps this file system from turning read-only")
    store_some(store, range(3, 6))
    assert store.stats().usage[TierName.DISK].read_only
    subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
    clock.now += 10
    store_some(store, range(6, 9))
    assert not store.stats().usage[TierName.DISK].read_only
    store.close()


def _is_read_only(place: Path) -> bool:
    try:
        (place / "probe").touch()
    except OSError:
        return True
    return False


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_store_that_is_removed_begins_anew(tmp_path: Path, what: str) -> None:
    clock = Clock()
    folder = tmp_path / "store"
    store = opened(folder, clock)
    store_some(store, range(5))
    if what == "folder":
        shutil.rmtree(folder)
    else:
        (folder / "data.mdb").unlink()
    store_some(store, range(5, 8))
    usage = store.stats().usage[TierName.DISK]
    assert usage.read_only and "removed" in usage.detail
    clock.now += 10
    store_some(store, range(8, 12))
    assert not store.stats().usage[TierName.DISK].read_only
    tokens = prompt(11)
    assert serve(store, [*tokens, 1]) == len(tokens)
    store.close()
    store = opened(folder, clock)
    assert serve(store, [*tokens, 1]) >= len(tokens) // CHUNK * CHUNK, "and it is there after a restart"
    store.close()
