"""Whether the disk tier may write, and what to say when it may not."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

_log = logging.getLogger(__name__)


class WriteHealth:
    """Read-only after a failed write, tried again after ``retry_seconds``; one log line a change of state."""

    def __init__(
        self, directory: Path, min_free_bytes: int, retry_seconds: float, clock: Callable[[], float]
    ) -> None:
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
        try:
            free = shutil.disk_usage(self._directory).free
        except OSError as error:
            self.failed(str(error))
            return False
        if free >= self._min_free_bytes:
            return True
        self.failed(f"{free / 2**20:.0f} MiB are free there, below the floor of {self._min_free_bytes / 2**20:.0f} MiB")
        return False

    def failed(self, detail: str) -> None:
        if not self.detail:
            _log.warning(
                "disk cache %s is read-only: %s. It keeps serving what it has and tries again every %g s; free "
                "space there or make the folder writable.",
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
