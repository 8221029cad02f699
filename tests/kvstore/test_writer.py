"""The disk writer's thread beside the engine's."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from tests.kvstore.test_store import Make, make  # noqa: F401


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_the_writer_gives_way_to_the_engine_and_nobody_else_does(make: Make) -> None:  # noqa: F811
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    store = make()
    assert store.flush(timeout=10)
    (writer,) = [thread for thread in threading.enumerate() if thread.name == "kvgate-disk-writer"]
    assert writer.native_id is not None
    assert os.getpriority(os.PRIO_PROCESS, writer.native_id) == min(19, mine + 10)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine
