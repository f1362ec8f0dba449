"""A request whose answer must match something: which token may come next depends on all before it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.constraints import Matcher
from tessera.engine.request import Request
from tessera.engine.sequence import Report, Sequence


class ConstrainedSequence(Sequence):
    """Its next step waits until its last token is known; the others' do not."""

    def __init__(self, request: Request, matcher: Matcher, **options: Any) -> None:
        """``options`` are Sequence's own. ``matcher`` has come as far as ``outputs``, preempted or not."""
        super().__init__(request, **options)
        self._matcher = matcher

    @property
    def pending(self) -> int:
        return 0 if self.in_flight else super().pending

    @property
    def mask(self) -> np.ndarray | None:
        short = len(self.outputs) < self.request.sampling.min_tokens
        return self._matcher.going_on() if short else self._matcher.mask

    def _accept(self, token: int, report: Report | None) -> bool:
        taken = super()._accept(token, report)
        if token in self.ends:  # also where the answer is complete before min_tokens
            self.finish_reason = "stop"
        if not self.finished:
            self._matcher.advance(token)
            if self._matcher.error is not None:
                constraint = self.request.sampling.constraint
                self.finish_reason, self.error = "error", f"{constraint}: {self._matcher.error}"
        return taken
