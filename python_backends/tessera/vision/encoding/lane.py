"""The order of work on the device: forwards on a stream of their own, one at a time.

Handing rows to tritonserver waits for them. It must not wait for the forward after them as well, so each piece of work
can be waited for by itself. torch's streams do not order themselves with the default stream, on which tritonserver's
Python backend copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


class LaunchedWork:
    """Something put on the device. On the CPU it is done when this is made."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def wait(self, *rows: torch.Tensor) -> None:
        """Returns when it is done; ``rows`` may then be read on the default stream."""
        if self._event is None:
            return
        self._event.synchronize()
        for tensor in rows:  # a copy on that stream may still run when their owner drops them
            tensor.record_stream(torch.cuda.default_stream(tensor.device))


class Lane:
    """Launches work on ``device``. One thread launches; any may wait for what was launched."""

    def __init__(self, device: str = "cpu") -> None:
        self.on_gpu = device != "cpu"
        self._stream = torch.cuda.Stream(device) if self.on_gpu else None
        self._forward = LaunchedWork()

    def make_room(self) -> None:
        """Waits until no forward is under way."""
        self._forward.wait()

    def forward(self, work: Callable[[], Result]) -> tuple[Result, LaunchedWork]:
        """Runs ``work``, which launches a forward, once no other is under way.

        One launched ahead would keep the GPU busier beside the language model's steps, but the two then cost each other
        more than that is worth, and whoever comes meanwhile could not pass it.
        """
        self.make_room()
        result, self._forward = self.launch(work)
        return result, self._forward

    def launch(self, work: Callable[[], Result]) -> tuple[Result, LaunchedWork]:
        """What ``work`` returns, and that which it put on the device."""
        if self._stream is None:
            return work(), LaunchedWork()
        with torch.cuda.stream(self._stream):
            result = work()
            event = torch.cuda.Event(blocking=True)
            event.record()
        return result, LaunchedWork(event)
