"""Responses that are kept, so that a later request can go on from them. In memory, bounded in number, size and time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import orjson

_Key = tuple[str, str]  # namespace, id


@dataclass(frozen=True, slots=True)
class Kept:
    body: dict[str, Any]  # the response object
    input: list[Any]  # the request's own items
    messages: list[dict[str, Any]]  # the conversation with the answer, as chat messages, without instructions


class KeptResponses:
    """Thread-safe. What is over a bound goes, oldest first.

    Args:
        max_count: of each namespace.
        max_bytes: of all together, as JSON.
        seconds: how long each is kept.
        clock: monotonic seconds.
    """

    def __init__(
        self, max_count: int, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._kept: OrderedDict[_Key, tuple[Kept, int, float]] = OrderedDict()  # with its size and its end
        self._bytes = 0
        self._lock = Lock()

    def put(self, namespace: str, kept: Kept) -> None:
        size = len(orjson.dumps([kept.body, kept.input, kept.messages]))
        with self._lock:
            self._kept[namespace, kept.body["id"]] = (kept, size, self._clock() + self._seconds)
            self._bytes += size
            self._expire()
            own = [key for key in self._kept if key[0] == namespace]
            for key in own[: max(0, len(own) - self._max_count)]:
                self._drop(key)
            while self._bytes > self._max_bytes and self._kept:
                self._drop(next(iter(self._kept)))

    def get(self, namespace: str, response_id: str) -> Kept | None:
        with self._lock:
            self._expire()
            found = self._kept.get((namespace, response_id))
            return found[0] if found else None

    def delete(self, namespace: str, response_id: str) -> bool:
        """Whether it was there."""
        with self._lock:
            self._expire()
            return self._drop((namespace, response_id))

    def _expire(self) -> None:
        now = self._clock()
        while self._kept:
            key, (_, _, end) = next(iter(self._kept.items()))
            if end > now:
                return
            self._drop(key)

    def _drop(self, key: _Key) -> bool:
        found = self._kept.pop(key, None)
        self._bytes -= found[1] if found else 0
        return found is not None
