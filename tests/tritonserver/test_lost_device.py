"""A process whose GPU is lost ends; one whose GPU works, or that has none, goes on."""

from __future__ import annotations

import re
import subprocess
import sys

import torch

from tessera.errors import end_process_if_lost, lost_device

LOST = """
import torch
from tessera.errors import end_process_if_lost

class Stream:
    def query(self):
        raise RuntimeError("CUDA error: device-side assert triggered\\nCompile with ...")

torch.cuda.is_initialized = lambda: True
torch.cuda.current_stream = Stream
try:
    end_process_if_lost()
finally:
    print("lived on")
"""


class BusyStream:
    def query(self) -> bool:
        return False


def test_without_a_gpu_nothing_is_lost() -> None:
    assert lost_device() is None
    end_process_if_lost()


def test_a_busy_gpu_is_not_lost(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", BusyStream)
    assert lost_device() is None


def test_the_process_ends_at_once_and_says_why() -> None:
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    told = r"the GPU is lost to process \d+, which ends: CUDA error: device-side assert triggered\n"
    assert re.fullmatch(told, done.stderr)
