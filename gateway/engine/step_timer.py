"""How long steps take on the device, without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

Tell = Callable[[float], None]


class StepTimer:
    """``start`` and ``stop`` around the launch of a step; ``stop`` says whom to tell the seconds it took.

    On CPU a launch is the step. On CUDA it only queues the work: there two events are recorded on the stream, and the
    time is told by a later call, once the device has passed them.

    Args:
        device: where steps run.
        clock: monotonic seconds, for CPU.
        event: makes a timing event, for CUDA.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float],
        event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
    ) -> None:
        self._clock = clock
        self._event = event if device.type == "cuda" else None
        self._started: Any = 0.0
        self._pending: deque[tuple[Any, Any, Tell]] = deque()

    def start(self) -> None:
        if self._event is None:
            self._started = self._clock()
        else:
            self._tell_finished()
            self._started = self._event()
            self._started.record()

    def stop(self, tell: Tell) -> None:
        if self._event is None:
            tell(self._clock() - self._started)
        else:
            ended = self._event()
            ended.record()
            self._pending.append((self._started, ended, tell))

    def _tell_finished(self) -> None:
        while self._pending and self._pending[0][1].query():
            started, ended, tell = self._pending.popleft()
            tell(started.elapsed_time(ended) / 1e3)
