"""What CUDA itself says of a GPU that is lost to a process, and of one that is only full."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tessera.errors import lost_device

FAULT = """
import torch
from tessera.errors import end_process_if_lost

end_process_if_lost()
try:
    torch._assert_async(torch.zeros((), device="cuda"))
    torch.cuda.synchronize()
except RuntimeError:
    end_process_if_lost()
print("lived on")
"""


def test_a_fault_in_a_kernel_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "the GPU is lost to process" in done.stderr


def test_to_be_out_of_memory_is_no_loss() -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert lost_device() is None
