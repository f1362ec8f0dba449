"""The order of work on the device: forwards on a stream of their own, one launched ahead of the one that runs.

Handing rows to tritonserver waits for them. It must not wait for the forward after them as well, so each piece of work
comes with a mark of its own; and that next forward must be in the GPU's queue by then, or the GPU would idle meanwhile.
torch's streams do not order themselves with the default stream, on which tritonserver's Python backend copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

AHEAD = 1  # forwards launched behind the one that runs


class Mark:
    """A point in the device's work. On the CPU it has passed when it is made."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def wait(self, *rows: torch.Tensor) -> None:
        """Returns when the work before it is done; ``rows`` may then be read on the default stream."""
        if self._event is None:
            return
        self._event.synchronize()
        for tensor in rows:  # a copy on that stream may still run when their owner drops them
            tensor.record_stream(torch.cuda.default_stream(tensor.device))


class Lane:
    """Launches work on ``device``. One thread launches; any may wait for marks."""

    def __init__(self, device: str = "cpu") -> None:
        self._stream = torch.cuda.Stream(device) if device != "cpu" else None
        self._forwards: deque[Mark] = deque()

    def forward(self, work: Callable[[], Result]) -> tuple[Result, Mark]:
        """Runs ``work``, which launches a forward, once no more than ``AHEAD`` others are under way."""
        while len(self._forwards) > AHEAD:
            self._forwards.popleft().wait()
        result, mark = self.launch(work)
        self._forwards.append(mark)
        return result, mark

    def launch(self, work: Callable[[], Result]) -> tuple[Result, Mark]:
        """What ``work`` returns, and a mark behind what it put on the device."""
        if self._stream is None:
            return work(), Mark()
        with torch.cuda.stream(self._stream):
            result = work()
            event = torch.cuda.Event(blocking=True)
            event.record()
        return result, Mark(event)
