"""kill -9 at random moments of a storing workload: it always opens, what was stored is back, and nothing is wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

from kvstore.maintenance import StoreFolder

from .crash_worker import open_store, prompt, serve

REPO = Path(__file__).resolve().parents[2]

#: ``make soak`` does it a hundred times.
ROUNDS = 100 if os.environ.get("KVGATE_SOAK") else 6

#: The store holds more prompts than this: none of the last ones may have been evicted.
RECENT = 4


def run_and_kill(folder: Path, seed: int, seconds: float) -> list[int]:
    """Store from ``seed`` on, kill after ``seconds`` of it; the seeds that were reported as stored."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.kvstore.crash_worker", str(folder), str(seed)], cwd=REPO, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert worker.stdout is not None
    assert worker.stdout.readline() == "open\n", "a store that was killed must open without repair"
    killer = threading.Timer(seconds, worker.kill)
    killer.start()
    stored = [int(line.split()[1]) for line in worker.stdout if line.endswith("\n")]
    assert worker.wait() == -9
    killer.join()
    return stored


def test_kill_nine_loses_nothing_that_was_stored_and_serves_nothing_wrong(tmp_path: Path) -> None:
    choose = random.Random(5)
    folder = tmp_path / "store"
    seed = 0
    for _ in range(ROUNDS):
        stored = run_and_kill(folder, seed, choose.uniform(0.01, 0.6))
        with StoreFolder(folder) as files:
            assert [fault for fault in files.verify() if fault] == []
        store = open_store(folder)
        for known in stored[-RECENT:]:
            tokens = prompt(known)
            assert serve(store, [*tokens, 1]) == len(tokens), "a stored prompt did not come back whole"
        store.close()
        seed = (stored[-1] if stored else seed) + 2
