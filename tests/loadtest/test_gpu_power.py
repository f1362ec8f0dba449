"""Watts and clocks from nvidia-smi's words; nothing where there is no GPU."""

from __future__ import annotations

import sys
import time

import gpu_power
import pytest
from gpu_power import GpuPower, Sample


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """A stand-in that writes down how it was asked and answers with the text set here."""
    program = tmp_path / "nvidia-smi"

    def answer(text: str) -> None:
        program.write_text(
            f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'asked')!r}, 'w').write(' '.join(sys.argv[1:]))\n"
            f"print({text!r})\n"
        )
        program.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_power, "INTERVAL_S", 0.01)
    return answer


def sampled(power: GpuPower) -> None:
    """Waits for three samples."""
    while len(power.samples) < 3 and power._thread.is_alive():
        time.sleep(0.01)


def test_watts_of_all_gpus_are_added_and_clocks_are_a_mean(nvidia_smi, tmp_path):
    nvidia_smi("690.50, 1500\n650.00, 1700")
    began = time.perf_counter()
    with GpuPower(["0", "1"]) as power:
        sampled(power)
    assert power.between(began, time.perf_counter()) == (1340.5, 1600.0)
    asked = (tmp_path / "asked").read_text()
    assert "--id=0,1 --query-gpu=power.draw,clocks.sm" in asked and "nounits" in asked


def test_only_the_time_asked_about_counts():
    power = GpuPower([])
    power.samples += [Sample(1.0, 100.0, 300.0), Sample(2.0, 600.0, 1500.0), Sample(3.0, 700.0, 1400.0)]
    assert power.between(1.5, 3.0) == (650.0, 1450.0)
    assert power.between(4.0, 9.0) is None


def test_a_card_that_does_not_tell_gives_no_sample(nvidia_smi):
    nvidia_smi("[N/A], 1500")
    with GpuPower(["0"]) as power:
        time.sleep(0.2)
    assert power.samples == []


def test_without_a_driver_nothing_is_sampled(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_power, "INTERVAL_S", 0.01)
    with GpuPower(["0"]) as power:
        power._thread.join(10)
        assert not power._thread.is_alive()
    assert power.between(0.0, time.perf_counter()) is None
    with GpuPower([]) as power:
        assert not power._thread.is_alive()
