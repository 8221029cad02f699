"""What the process gives back to the system: free heap between long-lived objects, and the weights' file."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gateway.engine.linears import pack_linears
from gateway.engine.memory import HeapTrim, tune_allocator

pytestmark = pytest.mark.skipif(
    not (sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "malloc_trim")), reason="glibc only"
)


def test_free_heap_between_live_objects_is_given_back_when_idle_or_after_a_minute_of_load() -> None:
    tune_allocator()
    now = [0.0]
    heap = HeapTrim(lambda: now[0])

    def leave_holes() -> list[torch.Tensor]:
        return [torch.ones(250_000) for _ in range(200)][::2]  # 100 MB live, 100 MB free in between

    for due in ({"idle": True}, {"idle": False}):
        seconds = heap.IDLE_SECONDS if due["idle"] else heap.BUSY_SECONDS
        kept = leave_holes()
        before = psutil.Process().memory_info().rss
        now[0] += seconds - 1
        assert not heap.trim_if_due(**due)
        now[0] += 1
        assert heap.trim_if_due(**due)
        assert before - psutil.Process().memory_info().rss > 70e6
        assert not heap.trim_if_due(**due)
        del kept


@torch.inference_mode()
def test_packing_lets_go_of_the_weights_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 32))
    file = tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    model.load_state_dict(load_file(file), assign=True)
    ids = torch.arange(50)
    expected = model(ids)
    assert str(file) in Path("/proc/self/maps").read_text()
    if not pack_linears(model):
        pytest.skip("this build of torch has no packed linears")
    assert str(file) not in Path("/proc/self/maps").read_text()
    assert torch.allclose(model(ids), expected, atol=1e-5)
