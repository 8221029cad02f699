"""Recording requests as traces: salted hashes of chunks, never text or token ids."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.keys import TOKEN_BYTES, encode_tokens

log = logging.getLogger(__name__)

#: Requests that may wait for the file; more are not recorded.
_QUEUE = 1024

_ID_BITS = 52  # any JSON reader takes these exactly

_CLOSE_SECONDS = 5.0


class TraceRecorder:
    """Appends a line for each request (see ``kvstore.replay.trace``), on a thread of its own. Thread-safe.

    The salt is random, made anew for each file and kept in memory only, so that nobody can try out what a prompt may
    have been. A file that is there already becomes ``<name>.1``, and so does one that reached ``max_bytes``; the two
    together are the bound. Requests are in the order in which they ended, with that time. A line also has
    ``block_size``.

    A file that can't be written later on ends the recording, with one line in the log; requests never notice.

    Raises OSError when the file can't be made at the start.
    """

    def __init__(
        self, path: Path, chunk_size: int, max_bytes: int = 2**28, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._step = chunk_size * TOKEN_BYTES
        self._chunk_size = chunk_size
        self._max_bytes = max_bytes
        self._clock = clock
        self._started = clock()
        self.dropped = 0
        self._open()
        self._waiting: queue.Queue[tuple[float, str, bytes, int] | None] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._run, name="kvgate-trace", daemon=True)
        self._thread.start()

    def record(self, namespace: str, prompt: Sequence[int], output_length: int) -> None:
        """Note a request that ended. Never blocks and never raises."""
        try:
            self._waiting.put_nowait((self._clock() - self._started, namespace, encode_tokens(prompt), output_length))
        except (queue.Full, ValueError):
            self.dropped += 1

    def close(self) -> None:
        """Write what waits, for a few seconds at most."""
        try:
            self._waiting.put(None, timeout=_CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(_CLOSE_SECONDS)

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(descriptor, "ab")
        self._written = 0
        self._salt = os.urandom(32)

    def _run(self) -> None:
        working = True
        while (item := self._waiting.get()) is not None:
            if not working:
                continue  # keep emptying the queue
            try:
                self._write(*item)
            except Exception as error:
                working = False
                log.warning("[trace] record: %s can't be written (%s); recording ends", self._path, error)
        try:
            self._file.close()
        except OSError:
            log.debug("the trace file did not close", exc_info=True)

    def _write(self, at: float, namespace: str, tokens: bytes, output_length: int) -> None:
        if self._written >= self._max_bytes:
            self._file.close()
            self._open()
        row = {
            "timestamp": round(at * 1000),
            "input_length": len(tokens) // TOKEN_BYTES,
            "output_length": output_length,
            "hash_ids": self._ids(namespace, tokens),
            "block_size": self._chunk_size,
        }
        line = json.dumps(row).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        self._written += len(line)

    def _ids(self, namespace: str, tokens: bytes) -> list[int]:
        """Chained as chunk keys are: equal ids mean equal prompts of one namespace up to there."""
        ids = []
        link = hashlib.blake2b(namespace.encode(), key=self._salt, digest_size=16).digest()
        for start in range(0, len(tokens), self._step):
            link = hashlib.blake2b(link + tokens[start : start + self._step], key=self._salt, digest_size=16).digest()
            ids.append(int.from_bytes(link[:8], "little") >> (64 - _ID_BITS))
        return ids
