"""Writing behind: one thread that stores chunks on disk and deletes them there, in order."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable

from kvstore.index import Node
from kvstore.tiers.disk import DiskTier
from kvstore.transfer import Transfer

log = logging.getLogger(__name__)


#: Added to the writer thread's nice value: an engine step has a thread on every core and waits for the slowest.
_NICE = 10


class DiskWriter:
    """Takes chunks to store on disk, never blocks the one who offers, never grows past its bound.

    Args:
        transfer: stores a chunk.
        disk: deletes one.
        capacity: chunks that may wait to be stored; deletions are 16 bytes each and are never refused.
    """

    def __init__(self, transfer: Transfer, disk: DiskTier, capacity: int) -> None:
        self._transfer = transfer
        self._disk = disk
        self._capacity = capacity
        self._waiting: deque[Node | bytes | Callable[[DiskTier], None]] = deque()
        self._stores = 0
        self._working = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvgate-disk-writer", daemon=True)
        self._thread.start()

    def offer(self, node: Node) -> bool:
        """Queue a chunk; False when the queue is full (the store is dropped)."""
        with self._changed:
            if self._closing or self._stores >= self._capacity:
                return False
            self._stores += 1
            self._waiting.append(node)
            self._changed.notify_all()
            return True

    def drop(self, key: bytes) -> None:
        """Delete a chunk on disk, after whatever was queued before."""
        with self._changed:
            self._waiting.append(key)
            self._changed.notify_all()

    def run(self, work: Callable[[DiskTier], None]) -> None:
        """Do something small with the disk tier on the writer's thread, after whatever was queued before."""
        with self._changed:
            self._waiting.append(work)
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued or being written; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._working, timeout)

    def close(self, timeout: float) -> bool:
        """Write what is queued, then end the thread; False when that takes longer than ``timeout`` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        _give_way()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                item = self._waiting.popleft()
                self._stores -= isinstance(item, Node)
                self._working = True
            try:
                if isinstance(item, Node):
                    self._transfer.write_to_disk(item)
                elif isinstance(item, bytes):
                    self._disk.drop(item)
                else:
                    item(self._disk)
            except Exception:
                log.exception("the disk tier's writer failed on a chunk")
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()


def _give_way() -> None:
    """Lower this thread's priority, where the system has one for each thread; elsewhere it would be the process's."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)
    except OSError as error:  # a sandbox may forbid it; the writer then competes as before
        log.debug("the disk writer keeps its priority: %s", error)
