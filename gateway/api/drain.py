"""Stopping with manners: not ready at once, running answers finish, and what can't is told so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.engine.types import EngineClosed

#: Asked after the health of a server, not for its work: never refused, never waited for.
_WORK_PREFIX = "/v1"


def shutting_down() -> EngineClosed:
    return EngineClosed("the server is shutting down; send the request again in a few seconds")


class Drain:
    """Counts running requests, and ends them when the time for it is over. Used on the event loop only.

    Args:
        seconds: how long running requests may go on after ``begin``.
        clock: monotonic seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.expired = asyncio.Event()
        self._seconds = seconds
        self._clock = clock
        self._deadline: float | None = None
        self._running = 0
        self._ends: set[Callable[[Exception], None]] = set()

    @property
    def begun(self) -> bool:
        return self._deadline is not None

    def begin(self) -> None:
        """From now on the server isn't ready, and new work is refused. Safe in a signal handler."""
        if self._deadline is None:
            self._deadline = self._clock() + self._seconds

    def over(self) -> bool:
        """Whether the server can go: nothing runs, or the time is over. Then all that runs is told."""
        if self._deadline is None:
            return False
        if self._running and self._clock() >= self._deadline:
            self.expired.set()
            for end in list(self._ends):
                end(shutting_down())
            return True
        return not self._running

    def refuses(self, path: str) -> bool:
        return self.begun and path.startswith(_WORK_PREFIX)

    @contextmanager
    def running(self, path: str) -> Iterator[None]:
        """Around a request: it is waited for."""
        counted = path.startswith(_WORK_PREFIX)
        self._running += counted
        try:
            yield
        finally:
            self._running -= counted

    def on_expiry(self, end: Callable[[Exception], None]) -> Callable[[], None]:
        """Have ``end`` called when the time is over. Returns how to take that back; twice is harmless."""
        self._ends.add(end)
        return lambda: self._ends.discard(end)
