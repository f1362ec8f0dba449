"""A request that scores labels: branch after branch of their tokens takes the place of an answer."""

from __future__ import annotations

from typing import Any

from tessera.engine.labels import LabelAnswer, LabelScorer
from tessera.engine.request import Request
from tessera.engine.sequence import Report, Sequence


class LabelSequence(Sequence):
    """Its ``outputs`` are the path of the branch that is asked for, in the end the best label's tokens."""

    rewinds = True

    def __init__(self, request: Request, scorer: LabelScorer, **options: Any) -> None:
        """``options`` are Sequence's own."""
        super().__init__(request, max_tokens=scorer.longest_path + 1, **options)
        self._scorer = scorer
        self.cache_limit = min(self.cache_limit, self.prompt_length)  # what follows is written again for every branch
        self._follow(scorer.branch.path if scorer.branch is not None else ())

    @property
    def pending(self) -> int:
        return 0 if self.in_flight else self.length - self.computed

    @property
    def children(self) -> tuple[int, ...]:
        branch = self._scorer.branch
        return () if branch is None else branch.children

    @property
    def labels(self) -> LabelAnswer | None:
        return self._scorer.answer() if self.finish_reason == "stop" else None

    def _accept(self, token: int, report: Report | None) -> bool:
        """On to the next branch: its path takes the place of the one before, as far as they differ."""
        assert report is not None, "nothing tells how likely the branch's children are"
        self._scorer.observe([logprob for _, logprob in report.top])
        branch = self._scorer.branch
        if branch is None:
            self.outputs = list(self._scorer.answer().tokens)
            self.finish_reason = "stop"
            return False
        same = 0
        while same < min(len(branch.path), len(self.outputs)) and branch.path[same] == self.outputs[same]:
            same += 1
        self._follow(branch.path)
        # The branch's last position must run even where its keys are known: its logits are what is asked for.
        self.computed = min(self.computed, self.prompt_length + same, self.known - 1)
        return False

    def _follow(self, path: tuple[int, ...]) -> None:
        self.outputs = list(path)
        self._make_places()
        self.ids[self.prompt_length : self.known] = self.cache_ids[self.prompt_length : self.known] = path
