"""The order of work on the device: forwards on a stream of their own, one at a time; beside it, where somebody waits, a
short one on a second stream.

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

    @property
    def done(self) -> bool:
        return self._event is None or self._event.query()

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
        # Its copies go first like its kernels, and no hardware queue is shared with the other stream: streams of one
        # priority may share one, and what is launched second then waits for the first.
        self._second = torch.cuda.Stream(device, priority=-1) if self.on_gpu else None
        self._forward = self._beside = LaunchedWork()

    @property
    def free(self) -> bool:
        """Whether no forward is under way."""
        return self._forward.done and self._beside.done

    def make_room(self) -> None:
        """Waits until no forward is under way."""
        self._forward.wait()
        self._beside.wait()

    def forward(self, work: Callable[[], Result]) -> tuple[Result, LaunchedWork]:
        """Runs ``work``, which launches a forward, once no other is under way.

        One launched ahead would keep the GPU busier beside the language model's steps, but the two then cost each other
        more than that is worth, and whoever comes meanwhile could not pass it.
        """
        self.make_room()
        result, self._forward = self.launch(work)
        return result, self._forward

    def beside(self, work: Callable[[], Result]) -> tuple[Result, LaunchedWork]:
        """Runs ``work``, which launches a forward, beside the one under way, once no other is beside that.

        The two must share no memory that either writes; nothing orders them. The next :meth:`forward` begins when both
        have ended.
        """
        self._beside.wait()
        result, self._beside = self._launched(work, self._second)
        return result, self._beside

    def launch(self, work: Callable[[], Result]) -> tuple[Result, LaunchedWork]:
        """What ``work`` returns, and that which it put on the device, in the order of the forwards."""
        return self._launched(work, self._stream)

    def in_order(self, work: Callable[[], object], *rows: torch.Tensor) -> None:
        """Within a forward: runs ``work``, which reads ``rows`` of this forward, in the order of those that are one at
        a time. Beside them that is when the one under way and this one have ended; the host does not wait."""
        stream = self._stream
        if stream is None or stream == (current := torch.cuda.current_stream(stream.device)):
            work()
            return
        stream.wait_stream(current)
        for tensor in rows:  # their owner may drop them while the work still waits
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            work()

    def _launched(self, work: Callable[[], Result], stream: torch.cuda.Stream | None) -> tuple[Result, LaunchedWork]:
        if stream is None:
            return work(), LaunchedWork()
        with torch.cuda.stream(stream):
            try:
                result = work()
            except Exception:
                stream.synchronize()  # no event tells when that ends which it did launch
                raise
            event = torch.cuda.Event(blocking=True)
            event.record()
        return result, LaunchedWork(event)
