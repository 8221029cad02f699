import torch

from gateway.engine.step_timer import StepTimer


class Device:
    """A stand-in for a CUDA stream: work is queued at once and done when the test says so."""

    def __init__(self) -> None:
        self.queued_s = 0.0
        self.done_s = 0.0


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.at = self.device.queued_s

    def query(self) -> bool:
        return self.device.done_s >= self.at

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) * 1e3


def test_on_cpu_the_launch_is_the_step() -> None:
    now = [10.0]
    timer, told = StepTimer(torch.device("cpu"), lambda: now[0]), []
    timer.start()
    now[0] = 10.25
    timer.stop(told.append)
    assert told == [0.25]


def test_on_cuda_the_device_is_timed_and_never_waited_for() -> None:
    device = Device()
    timer, told = StepTimer(torch.device("cuda"), lambda: 0.0, lambda: Event(device)), []
    for seconds in (0.5, 0.25):
        timer.start()
        device.queued_s += seconds
        timer.stop(told.append)
    assert told == []
    device.done_s = 0.6  # the first is done, the second runs
    timer.start()
    assert told == [0.5]
    device.done_s = 1.0
    timer.start()
    assert told == [0.5, 0.25]
