"""A request whose answer must match something: which token may come next depends on all before it.

A request that scores labels: branch after branch of their tokens takes the place of an answer.

Where masks are made that take long: beside the thread that steps, for a few answers at a time.

There quick masks are made too where a step needs many, for any number of answers, on another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceType
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from tessera.engine.sequence import NOT_FINITE, Report, Request, SampledToken, Sequence
from tessera.engine.structured_output.constraints import Mask, Matcher
from tessera.engine.structured_output.labels import LabelAnswer, LabelScorer


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
        if self.in_flight or not self._ready or self._matcher.error is None:
            return None
        return f"{self.request.sampling.constraint}: {self._matcher.error}"

    @property
    def turns(self) -> int:
        # A crowd's masks are made beside the steps, and not there yet when the next is planned: by a trace on an H200,
        # 64 JSON answers in flight, 22 of 62 run in a step.
        return 1 if self._matcher.slow else 3 if self._matcher.crowded else 2

    def mask(self, drafted: int = 0) -> Mask:
        mask = self._matcher.behind(drafted)
        short = len(self.outputs) + drafted < self.request.sampling.min_tokens
        return self._matcher.going_on(mask) if short and isinstance(mask, np.ndarray) else mask

    @property
    def certain(self) -> SequenceType[int]:
        return () if self.outputs or self.drafting is None else self._matcher.forced

    def verifiable(self, draft: SequenceType[int]) -> SequenceType[int]:
        return self._matcher.along(draft)

    def take(self, chosen: list[SampledToken]) -> list[SampledToken]:
        counted = chosen
        if not self._matcher.knows(len(self.draft)):  # the last token's place is run once more
            counted, self.draft = chosen[:-1], self.draft[:-1]
            self.uncounted += 1
        taken = super().take(counted) if counted else counted
        if self.finished:
            return taken
        if counted is not chosen:
            self.computed = min(self.computed, self.known - 1)
        tokens = [token for token, _ in taken]
        if self._matcher.slow or (not self._lane.in_steps and self._matcher.crowded):
            self._ready = False
            self._lane.collect(partial(self._follow, tokens))
            return taken
        self._matcher.advance(*tokens)
        if (failure := self.failure) is not None:
            self.finish_reason, self.error = "error", failure
            return taken
        return taken + self._take_rest()

    def _take_rest(self) -> list[SampledToken]:
        """What is left of the answer, without a step, where there is no choice and nobody asks how likely it is."""
        asked, rest = self.request.sampling, list[SampledToken]()
        if self.ends and asked.logprobs is None and not self.request.margin:
            for token in self._matcher.rest:
                if not self.finished:
                    self._make_places()
                    self._accept(token, None)
                    rest.append((token, None))
        return rest

    def _accept(self, token: int, report: Report | None) -> bool:
        taken = super()._accept(token, report)
        if token in self.ends:  # also where the answer is complete before min_tokens
            self.finish_reason = "stop"
        return taken

    def _follow(self, tokens: list[int]) -> None:
        """On the lane's quick thread, which hands on what takes long: that may have been found out since."""
        if self._matcher.slow:
            self._lane.run(partial(self._go_on, self._matcher.advance_later(*tokens)))
        else:
            self._matcher.advance(*tokens)
            self._go_on(partial(self._matcher.behind, len(self._matcher.forced)))

    def _go_on(self, make_mask: Callable[[], Any]) -> None:
        make_mask()
        self._ready = True


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
        if token == NOT_FINITE:
            return super()._accept(token, report)
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
        self.ids[self.prompt_length : self.known] = path


MOST_OUTSIDE = 64


class MaskLane:
    """One thread, and ``places`` for answers whose masks it makes; further ones stand outside until a place is free.

    Answers are any objects, known by identity. Any thread may call.

    ``in_steps``: whether steps wait for all quick masks anyway, so that none need be made here.
    """

    def __init__(self, places: int) -> None:
        self.in_steps = False
        self._places = places
        self._lock = threading.Lock()
        self._answers: dict[object, None] = {}  # the first that came first; as many as there are places are inside
        self._thread = ThreadPoolExecutor(1, "masks")
        self._collected: list[Callable[[], None]] = []
        self._quick = ThreadPoolExecutor(1, "quick masks")
        self._last: Future[None] | None = None  # of what this one was given
        self._news = threading.Event()

    def __bool__(self) -> bool:
        """Whether there is anything to :meth:`wait` for."""
        return bool(self._answers) or not (self._last is None or self._last.done())

    @property
    def full(self) -> bool:
        """Whether there should come no more."""
        return len(self._answers) >= self._places + MOST_OUTSIDE

    def holds(self, answer: object) -> bool:
        """Whether it has a place. It takes one, or its place outside, when it is first asked for."""
        with self._lock:
            self._answers.setdefault(answer)
            return answer in islice(self._answers, self._places)

    def leave(self, answer: object) -> None:
        with self._lock:
            self._answers.pop(answer, None)

    def run(self, work: Callable[[], None]) -> None:
        """Runs ``work`` after all that was given before."""
        self._thread.submit(self._run, [work])

    def collect(self, work: Callable[[], None]) -> None:
        """Keeps ``work``, which must not raise and is quick or hands on to :meth:`run`, for :meth:`begin`. For the
        thread that steps."""
        self._collected.append(work)

    def begin(self) -> None:
        """Runs what was collected in turn, beside what :meth:`run` was given."""
        if self._collected:
            collected, self._collected = self._collected, []
            self._last = self._quick.submit(self._run, collected)

    def wake(self) -> None:
        """Ends a :meth:`wait`, the one under way or the next."""
        self._news.set()

    def wait(self, seconds: float) -> None:
        """Until some work is done that this has not told of yet, but no longer than this."""
        self._news.wait(seconds)
        self._news.clear()

    def _run(self, works: list[Callable[[], None]]) -> None:
        try:
            for work in works:
                work()
        finally:
            self._news.set()
