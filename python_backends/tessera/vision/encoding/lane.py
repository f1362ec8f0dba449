"""The order of work on the device: forwards on a stream of their own, one launched ahead of the one that runs.

Handing rows to tritonserver waits for them. It must not wait for the forward after them as well, so each piece of work
can be waited for by itself; and that next forward must be in the GPU's queue by then, or the GPU would idle meanwhile.
torch's streams do not order themselves with the default stream, on which tritonserver's Python backend copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

AHEAD = 1  # forwards launched behind the one that runs


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
        self._stream = torch.cuda.Stream(device) if device != "cpu" else None
        self._forwards: deque[LaunchedWork] = deque()

    def make_room(self, under_way: int = AHEAD) -> None:
        """Waits until no more than so many forwards are under way."""
        while len(self._forwards) > under_way:
            self._forwards.popleft().wait()

    def forward(self, work: Callable[[], Result]) -> tuple[Result, LaunchedWork]:
        """Runs ``work``, which launches a forward, once no more than ``AHEAD`` others are under way."""
        self.make_room()
        result, launched = self.launch(work)
        self._forwards.append(launched)
        return result, launched

    def launch(self, work: Callable[[], Result]) -> tuple[Result, LaunchedWork]:
        """What ``work`` returns, and that which it put on the device."""
        if self._stream is None:
            return work(), LaunchedWork()
        with torch.cuda.stream(self._stream):
            result = work()
            event = torch.cuda.Event(blocking=True)
            event.record()
        return result, LaunchedWork(event)
