"""Whether the disk tier may write, and what to say when it may not."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

_log = logging.getLogger(__name__)


class WriteHealth:
    """Read-only after a failed write, tried again after ``retry_seconds``; one log line a change of state."""

    def __init__(self, directory: Path, min_free_bytes: int, retry_seconds: float, clock: Callable[[], float]) -> None:
        self.detail = ""  # why the tier is read-only; empty when it writes
        self._directory = directory
        self._min_free_bytes = min_free_bytes
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._failed_at = 0.0

    @property
    def waiting(self) -> bool:
        """Read-only, and too early to try again. A clock that was set back ends the wait."""
        return bool(self.detail) and 0 <= self._clock() - self._failed_at < self._retry_seconds

    def may_write(self) -> bool:
        """Looks at the free space too, since a disk filled to the last byte hurts everybody on it."""
        if self.waiting:
            return False
        if self._free_bytes() >= self._min_free_bytes:
            return True
        self.failed(f"less than the floor of {self._min_free_bytes / 2**20:.0f} MiB is free")
        return False

    def failed(self, reason: str) -> None:
        # LMDB reports a full disk as "Input/output error" too, so the free space is part of the story.
        detail = f"{reason} ({self._free_bytes() / 2**20:.0f} MiB free)"
        if not self.detail:
            _log.warning(
                "disk cache %s is read-only: %s. It serves what it has and tries again every %g s; free space "
                "there or make the folder writable.",
                self._directory,
                detail,
                self._retry_seconds,
            )
        self.detail = detail
        self._failed_at = self._clock()

    def succeeded(self) -> None:
        if self.detail:
            _log.warning("disk cache %s is writable again", self._directory)
        self.detail = ""

    def _free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self._directory).free
        except OSError:  # the folder is gone
            return 0
