"""What GPUs draw, by their own counters (NVML)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pynvml


@dataclass(frozen=True)
class Reading:
    """Of some GPUs at one moment: joules since their driver was loaded, in sum; the mean SM clock in MHz; the hottest
    one's temperature in degrees Celsius; the mean share of NVML's last period (a sixth of a second or more) in which
    anything ran on one."""

    joules: float
    mhz: float
    celsius: float
    busy: float


class GpuMeter:
    """Reads some GPUs, which NVML numbers by their place on the bus.

    ``gpus``: their numbers or UUIDs. Raises OSError where there is no driver or no such GPU, or where it does not count
    joules (before Volta, parts of one).
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._handles: list[Any] = []
        try:
            pynvml.nvmlInit()
            for gpu in gpus:
                by_number = gpu.isdecimal()
                find = pynvml.nvmlDeviceGetHandleByIndex if by_number else pynvml.nvmlDeviceGetHandleByUUID
                self._handles.append(find(int(gpu) if by_number else gpu))
        except pynvml.NVMLError as error:
            raise OSError(f"cannot read GPU {', '.join(gpus)}: {error}") from error
        self.read()

    @classmethod
    def of_process(cls, environment: Mapping[str, str]) -> GpuMeter:
        """Of the first GPU that the environment shows. Raises OSError."""
        return cls([environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]])

    def read(self) -> Reading:
        """Raises OSError if a GPU does not answer."""
        try:
            millijoules = sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, self._handles))
            clocks = [pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) for handle in self._handles]
            busy = [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in self._handles]
            heat = [pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) for handle in self._handles]
        except pynvml.NVMLError as error:
            raise OSError(f"a GPU does not say what it draws: {error}") from error
        return Reading(millijoules / 1e3, fmean(clocks), max(heat), fmean(busy) / 100)
