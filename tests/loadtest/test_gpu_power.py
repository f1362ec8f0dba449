"""Watts, clocks and heat from NVML's counters; nothing where there is no GPU."""

import time
from types import SimpleNamespace

import pynvml
import pytest
from gpu_power import Draw, GpuPower, Reading

from tessera.settings.gpu import GpuMeter

BY_NUMBER = {0: "first", 1: "second"}


class Cards:
    """A stand-in for NVML with two cards. Each look at their joules is 20 ms after the one before."""

    def __init__(self) -> None:
        self.watts = {"first": 690.0, "second": 650.0}
        self.clocks = {"first": 1500, "second": 1700}
        self.seconds = {"first": 0.0, "second": 0.0}
        self.silent = False

    def energy(self, card: str) -> int:
        if self.silent:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self.seconds[card] += 0.02
        return round(1e3 * self.watts[card] * self.seconds[card])


@pytest.fixture
def cards(monkeypatch) -> Cards:
    cards = Cards()
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", BY_NUMBER.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", {"GPU-49fd": "second"}.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", cards.energy)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda card, kind: cards.clocks[card])
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetUtilizationRates", lambda card: SimpleNamespace(gpu={"first": 80, "second": 100}[card])
    )
    return cards


def test_joules_of_all_cards_are_added_clocks_and_busy_shares_are_means(cards):
    first, second = (Reading.of(GpuMeter(["0", "1"])) for _ in range(2))
    assert (first.mhz, first.busy) == (1600.0, 0.9)
    assert second.joules - first.joules == pytest.approx(2 * 0.02 * (690 + 650))  # two looks: one as it is made


def test_a_card_that_does_not_count_joules_is_refused_and_one_that_falls_silent_is_an_error(cards):
    meter = GpuMeter(["0"])
    cards.silent = True
    with pytest.raises(OSError, match="a GPU does not say what it draws: Not Supported"):
        Reading.of(meter)
    with pytest.raises(OSError, match="does not say"):
        GpuMeter(["0"])


def test_watts_are_joules_over_the_time_asked_about():
    power = GpuPower([])
    power.samples += [
        (1.0, Reading(50.0, 300.0, 0.0)),
        (2.0, Reading(700.0, 1500.0, 0.5)),
        (4.0, Reading(2000.0, 1400.0, 1.0)),
    ]
    draw = power.between(1.5, 4.0)
    assert draw == Draw(650.0, 1450.0, 0.75)
    figures = []
    draw.emit(lambda *figure: figures.append(figure), 20.0, "page")
    assert figures == [("watts", 650.0, "W"), ("mhz", 1450, "MHz"), ("joules", 32.5, "J/page")]
    assert power.between(3.0, 9.0) is None


def test_without_a_driver_it_says_so_and_nothing_is_sampled(monkeypatch, capsys):
    def none() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", none)
    with GpuPower(["0"]) as power:
        assert not power._thread.is_alive()
    assert power.between(0.0, time.perf_counter()) is None
    assert "no watts: cannot read GPU 0: NVML Shared Library Not Found" in capsys.readouterr().err
