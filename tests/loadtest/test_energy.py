"""A lap's time and joules, on a stand-in for a GPU that works by itself and has its own clock."""

from __future__ import annotations

import math
from types import SimpleNamespace

import energy
import pytest
import torch
from energy import Repeater
from gpu_power import Draw, GpuPower

LAP_S, LAUNCH_S, WATTS = 0.01, 0.0005, 650.0


class Gpu:
    """Laps that are launched are done one after the other, each in 10 ms."""

    def __init__(self) -> None:
        self.now = self.busy_until = 0.0
        self.most_under_way = 0.0
        self.asked: list[tuple[float, float]] = []

    def lap(self) -> None:
        self.now += LAUNCH_S
        self.busy_until = max(self.now, self.busy_until) + LAP_S
        self.most_under_way = max(self.most_under_way, (self.busy_until - self.now) / LAP_S)

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)

    def between_changes(self, began: float, ended: float) -> Draw:
        self.asked.append((began, ended))
        return Draw(WATTS, 1490.0, 61)


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    gpu = Gpu()

    class Event:
        def record(self) -> None:
            self.ends = gpu.busy_until

        def synchronize(self) -> None:
            gpu.wait(self.ends)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.wait(gpu.busy_until))
    monkeypatch.setattr(energy, "time", SimpleNamespace(perf_counter=lambda: gpu.now))
    return gpu


def test_a_lap_costs_its_time_on_the_gpu_and_the_watts_meanwhile(gpu):
    cost = Repeater(gpu, torch.device("cuda"), 0.4, 0.1).cost(gpu.lap, calls=4)
    assert cost.seconds == pytest.approx(LAP_S) and cost.us_a_call == pytest.approx(2500)
    assert cost.watts == pytest.approx(WATTS) and cost.mhz == 1490.0
    assert cost.of_a_call.joules == pytest.approx(WATTS * LAP_S / 4) and cost.of_a_call.us_a_call == cost.us_a_call
    ((began, ended),) = gpu.asked
    assert ended - began == pytest.approx(0.4, abs=LAP_S) and ended < gpu.busy_until
    assert 4 < gpu.most_under_way < 7  # the GPU has work all the time, and the host does not run away


def test_calls_are_made_in_one_graph(gpu, monkeypatch):
    monkeypatch.setattr(energy, "Captured", lambda lap: SimpleNamespace(replay=lap))
    cost = Repeater(gpu, torch.device("cuda"), 0.2, 0.0).recorded([gpu.lap, gpu.lap])
    assert cost.calls == 2 and cost.seconds == pytest.approx(2 * LAP_S)


def test_a_lap_longer_than_the_time_is_measured_once_more(gpu):
    cost = Repeater(gpu, torch.device("cuda"), 0.001, 0.0).cost(gpu.lap)
    assert cost.seconds == pytest.approx(LAP_S)


def test_without_a_counter_there_are_times():
    with GpuPower([]) as power:
        cost = Repeater(power, torch.device("cpu"), 0.01, 0.0).recorded([lambda: None] * 2)
    assert cost.seconds > 0 and math.isnan(cost.joules) and math.isnan(cost.mhz)
