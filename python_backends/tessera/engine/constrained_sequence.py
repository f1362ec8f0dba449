"""A request whose answer must match something: which token may come next depends on all before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tessera.engine.constraints import Matcher
from tessera.engine.mask_lane import MaskLane
from tessera.engine.request import Request
from tessera.engine.sequence import Report, Sequence


class ConstrainedSequence(Sequence):
    """Its next step waits until its last token is known and, where that takes long, the mask after it; the others' do
    not."""

    def __init__(self, request: Request, matcher: Matcher, lane: MaskLane, **options: Any) -> None:
        """``options`` are Sequence's own. ``matcher`` has come as far as ``outputs``, preempted or not; ``lane`` is
        where it goes on once it is slow."""
        super().__init__(request, **options)
        self._matcher = matcher
        self._lane = lane
        self._ready = True

    def take_place(self) -> None:
        """In the lane, or in the queue before it, where its grammar is slow from the beginning."""
        if self._matcher.slow:
            self._lane.holds(self)

    @property
    def pending(self) -> int:
        return super().pending if self._ready and not self.in_flight else 0

    @property
    def parked(self) -> bool:
        # Whose mask is made keeps its blocks if it has any, but without them need not stand in anybody's way.
        return self._matcher.slow and not (self._lane.holds(self) and (self._ready or self.block_table))

    @property
    def failure(self) -> str | None:
        if not self._ready or self._matcher.error is None:
            return None
        return f"{self.request.sampling.constraint}: {self._matcher.error}"

    @property
    def mask(self) -> np.ndarray | None:
        short = len(self.outputs) < self.request.sampling.min_tokens
        return self._matcher.going_on() if short else self._matcher.mask

    def _accept(self, token: int, report: Report | None) -> bool:
        taken = super()._accept(token, report)
        if token in self.ends:  # also where the answer is complete before min_tokens
            self.finish_reason = "stop"
        if self.finished:
            return taken
        if self._matcher.slow:
            self._ready = False
            self._lane.run(partial(self._go_on, self._matcher.advance_later(token)))
        elif self._matcher.crowded:
            self._ready = False
            self._lane.collect(partial(self._go_on_among_many, token))
        else:
            self._matcher.advance(token)
            if (failure := self.failure) is not None:
                self.finish_reason, self.error = "error", failure
        return taken

    def _go_on_among_many(self, token: int) -> None:
        if self._matcher.slow:  # which was found out since
            self._lane.run(partial(self._go_on, self._matcher.advance_later(token)))
        else:
            self._go_on(partial(self._matcher.advance, token))

    def _go_on(self, advance: Callable[[], None]) -> None:
        advance()
        self._ready = True
