"""The LMDB environment of the disk tier and the two files beside it: the lock and the shutdown marker.

What survives what. A killed process loses nothing that was committed: the pages are in the system's page cache.
A crash of the system may tear an environment that does not sync on commit, so a marker names the boot it was
written under, and an environment that was left open under another boot is emptied. With ``durable`` every commit
is synced and only the last transaction may be lost.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

FORMAT_VERSION = 1

_DATA, _READERS, _LOCK, _MARKER = "data.mdb", "lock.mdb", "kvstore.lock", "kvstore.json"
_READER_TABLE_BYTES = 64 * 1024
_MAPS = Path("/proc/self/maps")
_INODE_FIELD = 4
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DATABASES = (b"chunks", b"tokens", b"values", b"meta", b"pins")

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_log = logging.getLogger(__name__)


class StoreInUse(Exception):
    """Another process (or another tier of this one) has the folder open."""


class DiskUnavailable(Exception):
    """The folder cannot hold a disk tier. The message says why and what to do."""


class DiskEnvironment:
    """One opened store folder. Transactions are context managers; ``close`` waits for those still running.

    Raises StoreInUse or DiskUnavailable.
    """

    def __init__(self, directory: Path, map_size: int, durable: bool) -> None:
        self.directory = directory
        self.unclean = False  # the last process did not close the store
        self._map_size = map_size
        self._durable = durable
        self._gate = threading.Condition()
        self._readers = 0
        self._panicked = False
        self._inode = -1
        self._map: tuple[int, int] | None = None  # addresses, where the system tells them
        self._env: lmdb.Environment | None = None
        self._dbs: dict[bytes, lmdb._Database] = {}
        self._lock_fd = _take_folder(directory)
        try:
            self._recover()
            self._open()
            if durable:  # what an earlier process left unsynced is safe from here on too
                self._opened().sync(True)
                self._mark("open", synced=True)
        except BaseException as error:
            os.close(self._lock_fd)
            if isinstance(error, (OSError, lmdb.Error)):
                raise unavailable(directory, error) from error
            raise

    def db(self, name: bytes) -> lmdb._Database:
        return self._dbs[name]

    @property
    def page_bytes(self) -> int:
        return int(self._opened().stat()["psize"])

    @contextmanager
    def read(self) -> Iterator[lmdb.Transaction[memoryview]]:
        """A short read transaction whose values are memoryviews of the map, dead when it ends. Raises lmdb.Error."""
        with self._gate:
            env = self._opened()
            self._readers += 1
        try:
            with env.begin(buffers=True) as txn:
                yield txn
        finally:
            with self._gate:
                self._readers -= 1
                self._gate.notify_all()

    @contextmanager
    def write(self) -> Iterator[lmdb.Transaction]:
        """The write transaction; aborted by any exception. The caller sees to it that there is only one writer.

        Raises lmdb.Error, or OSError when the environment had to be opened anew and could not be.
        """
        if self._lock_fd >= 0 and (self._panicked or self._env is None):
            self.reopen()
        try:
            with self._opened().begin(write=True) as txn:
                yield txn
        except lmdb.PanicError:  # LMDB could not write its root page and refuses everything until opened anew
            self._panicked = True
            raise

    def reopen(self, *, empty: bool = False) -> None:
        """Close and open again; ``empty`` deletes all content on the way.

        Not while a write transaction is open. Raises lmdb.Error or OSError; the store is then closed, and the next
        write opens it.
        """
        self._close_env()
        if empty:
            self._delete()
        self._open()
        self._panicked = False

    @property
    def attached(self) -> bool:
        """Whether the file that is written is still the one in the folder: somebody may have removed either."""
        try:
            return os.stat(self.directory / _DATA).st_ino == self._inode
        except OSError:
            return False

    def unmap(self) -> None:
        """Take all pages of the map out of resident memory; they stay in the page cache.

        Not while ``close`` or ``reopen`` may run. For after deletions, which touch the first page of every value, and
        the system maps its neighbours with it.
        """
        if self._env is not None and self._map is not None:
            _unmap(*self._map)

    def recreate(self) -> None:
        """Begin anew after the folder or the file was removed; what was stored is gone.

        Raises lmdb.Error, OSError, StoreInUse or DiskUnavailable; it can be tried again.
        """
        self._close_env()
        if not _same_file(self.directory / _LOCK, self._lock_fd):
            lock_fd = _take_folder(self.directory)
            os.close(self._lock_fd)
            self._lock_fd = lock_fd
        self._delete()
        self._mark("open", synced=False)
        self._open()
        self._panicked = False

    def close(self) -> None:
        """Sync, mark the shutdown as clean and let go of the folder."""
        if self._lock_fd < 0:
            return
        try:
            if self._env is not None:
                self._env.sync(True)
                self._close_env()
                self._mark("clean", synced=True)
        except (lmdb.Error, OSError) as error:
            self._close_env()
            _log.warning("disk cache %s could not be closed cleanly: %s", self.directory, error)
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _opened(self) -> lmdb.Environment:
        if self._env is None:
            raise lmdb.Error("the disk cache is closed")
        return self._env

    def _open(self) -> None:
        try:
            self._open_env()
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError) as error:
            _log.warning("disk cache %s is damaged and starts empty: %s", self.directory, error)
            self._delete()
            self._open_env()

    def _open_env(self) -> None:
        _allocate(self.directory / _READERS, _READER_TABLE_BYTES)
        env = lmdb.open(
            str(self.directory),
            map_size=self._map_size,
            max_dbs=len(_DATABASES),
            readahead=True,  # without it a cold read is many times slower
            writemap=False,  # with it a full disk ends the process with SIGBUS
            meminit=False,
            sync=self._durable,
            metasync=False,
        )
        try:
            self._dbs = {name: env.open_db(name) for name in _DATABASES}
        except lmdb.Error:
            env.close()
            raise
        self._inode = os.stat(self.directory / _DATA).st_ino
        self._map = _mapped_range(self._inode)
        with self._gate:
            self._env = env

    def _close_env(self) -> None:
        with self._gate:
            env, self._env = self._env, None
            # The map must not go while somebody copies from it.
            self._gate.wait_for(lambda: self._readers == 0)
        if env is not None:
            env.close()

    def _recover(self) -> None:
        """Decide from the marker alone, before LMDB looks at a file that a crash may have torn."""
        found = self._read_marker()
        reason = ""
        if found is None:
            if (self.directory / _DATA).exists():
                raise DiskUnavailable(
                    f"{self.directory} holds an LMDB file that is not a KV store: choose an empty folder"
                )
        elif found.get("format") != FORMAT_VERSION:
            reason = f"it has format {found.get('format')}, this version writes {FORMAT_VERSION}"
        elif found.get("state") != "clean":
            self.unclean = True
            boot = _boot_id()
            if not found.get("synced") and (not boot or found.get("boot") != boot):
                reason = "the system went down while it was open, and it was not synced"
        if reason:
            _log.warning("disk cache %s starts empty: %s", self.directory, reason)
            self._delete()
        self._mark("open", synced=False)

    def _delete(self) -> None:
        for name in (_DATA, _READERS):
            (self.directory / name).unlink(missing_ok=True)

    def _read_marker(self) -> dict[str, object] | None:
        try:
            found = json.loads((self.directory / _MARKER).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _mark(self, state: str, *, synced: bool) -> None:
        """Write the marker so that either the old or the new one is there after a crash, and on the disk."""
        marker = {"format": FORMAT_VERSION, "state": state, "boot": _boot_id(), "synced": synced}
        fresh = self.directory / f"{_MARKER}.new"
        with fresh.open("w") as file:
            json.dump(marker, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.directory / _MARKER)
        folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def unmap_pages(value: npt.NDArray[np.uint8]) -> None:
    """Take the whole pages of a value that was read out of resident memory; they stay in the page cache.

    Without it the process seems to grow to the size of the store. Reading them again costs the page faults of a
    first read. A refusal by the system is harmless and ignored.
    """
    page = mmap.PAGESIZE
    start = -(-value.ctypes.data // page) * page
    stop = (value.ctypes.data + value.size) // page * page
    if stop > start:
        _unmap(start, stop)


def _unmap(start: int, stop: int) -> None:
    _madvise(start, stop - start, mmap.MADV_DONTNEED)


def _mapped_range(inode: int) -> tuple[int, int] | None:
    """First and last address of this process's map of a file; None where the system doesn't tell."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return None
    for fields in map(str.split, lines):
        if len(fields) > _INODE_FIELD and fields[_INODE_FIELD] == str(inode) and fields[-1].endswith(_DATA):
            start, stop = fields[0].split("-")
            return int(start, 16), int(stop, 16)
    return None


def unavailable(directory: Path, error: Exception) -> DiskUnavailable:
    return DiskUnavailable(
        f"the disk cache folder {directory} cannot be used: {error}. Make it writable for this user, free space "
        f"there, choose another folder, or leave the disk tier out."
    )


def _take_folder(directory: Path) -> int:
    """Make the folder and lock it; the lock goes with the process, however it ends. Returns the lock's descriptor."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise unavailable(directory, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    except OSError as error:
        owner = os.pread(descriptor, 20, 0).decode("ascii", "replace")
        os.close(descriptor)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise unavailable(directory, error) from error
        raise StoreInUse(
            f"the disk cache folder {directory} is in use by process {owner or 'unknown'}: stop that process, or "
            f"give each server its own folder"
        ) from error
    return descriptor


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _allocate(path: Path, size: int) -> None:
    """Give LMDB's reader table real blocks: it is written through a map, where a full disk would be SIGBUS."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Some file systems cannot; they then behave as without this precaution.
        with suppress(AttributeError):
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    finally:
        os.close(descriptor)


def _boot_id() -> str:
    """Changes with every start of the system; empty where the system does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
