"""What the host puts in front of a step is what the device reads, however far ahead the host is."""

import torch

from tessera.kernels.transfer import Staging


def test_nothing_is_overwritten_that_the_device_has_not_read():
    target = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
    staging, seen = Staging(target), []
    for turn in range(12):  # more than it has places, and none is waited for
        for _ in range(8):
            torch.sin(torch.ones(1 << 24, device="cuda"))  # the device is busy with this meanwhile
        staging.front()[:] = turn
        staging.send(len(target) // 2)
        seen.append((target[0].clone(), target[: len(target) // 2].min().clone(), target.max().clone()))
    assert [[int(number) for number in each] for each in seen] == [[turn] * 3 for turn in range(12)]
    assert not target[len(target) // 2 :].any()
