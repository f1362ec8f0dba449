"""Which tokens run in the next step.

First every running sequence, those that decode before those whose prompt is still being read; then, with what is
left of the budget, sequences that wait, in order of arrival. When blocks run out, the last one in that order gives
its blocks back and waits to be computed again. Whoever was preempted arrived before everything that waits behind
it, and nothing overtakes the head of the queue, so every sequence gets its turn.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as SequenceType

from tessera.engine.cache.block_manager import BlockManager
from tessera.engine.scheduling.batch import ScheduledBatch, ScheduledSpan
from tessera.engine.sequence import Sequence


class Scheduler:
    """Plans steps of at most ``max_batched_tokens`` tokens over at most ``max_sequences`` running sequences.

    Each planned batch must run, in order, and be given to :meth:`apply`; the next may be planned before that.
    """

    def __init__(self, blocks: BlockManager, max_batched_tokens: int, max_sequences: int) -> None:
        self.blocks = blocks
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._max_batched_tokens = max_batched_tokens
        self._max_sequences = max_sequences

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda s: s.number)

    def schedule(self) -> ScheduledBatch:
        """Plans the next step; it is empty when nothing can run before a batch in flight is applied."""
        spans: list[ScheduledSpan] = []
        preempted = self.preemptions
        budget = self._plan_running(spans, self._max_batched_tokens)
        if self.preemptions == preempted:  # else the blocks that came free are needed where they are
            self._plan_waiting(spans, budget)
        spans.sort(key=lambda span: span.count > 1)
        return ScheduledBatch(spans)

    def apply(self, batch: ScheduledBatch, tokens: SequenceType[int]) -> list[Sequence]:
        """Gives the batch's sampling sequences their tokens, and releases the sequences that ended by them.

        Returns the sequences that took a token: those that ended meanwhile did not.
        """
        taken = []
        for sequence, token in zip(batch.sampling, tokens, strict=True):
            sequence.in_flight -= 1
            if sequence.finished:
                continue
            sequence.append(token)
            taken.append(sequence)
            if sequence.finished:
                self._remove(sequence)
        return taken

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence that has not ended, wherever it is."""
        if sequence.finished:
            raise RuntimeError(f"sequence {sequence.number} ended twice")
        sequence.finish_reason = reason
        self._remove(sequence)

    def drop_all(self) -> None:
        """Forgets every sequence and everything cached, whatever state a failed step left behind."""
        for sequence in (*self.waiting, *self.running):
            sequence.block_table = []
        self.waiting, self.running = [], []
        self.blocks.reset()

    def check(self) -> None:
        """Raises AssertionError unless queue, running list and block books agree."""
        everyone = [*self.waiting, *self.running]
        assert len(set(everyone)) == len(everyone), "a sequence is queued twice"
        assert not any(sequence.finished for sequence in everyone), "a finished sequence is queued"
        assert not any(sequence.block_table for sequence in self.waiting), "a waiting sequence holds blocks"
        numbers = [sequence.number for sequence in self.waiting]
        assert numbers == sorted(numbers), "the queue is out of order"
        assert len(self.running) <= self._max_sequences, "too many sequences run"
        self.blocks.check(everyone)

    def _plan_running(self, spans: list[ScheduledSpan], budget: int) -> int:
        order = sorted(self.running, key=lambda sequence: (sequence.pending > 1, sequence.number))
        while order and budget:
            sequence = order.pop(0)
            count = min(sequence.pending, budget)
            if not count:
                continue
            while not self.blocks.grow(sequence, sequence.computed + count):
                victim = order.pop() if order else sequence
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                spans.append(self._plan(sequence, count))
                budget -= count
        return budget

    def _plan_waiting(self, spans: list[ScheduledSpan], budget: int) -> None:
        while self.waiting and budget and len(self.running) < self._max_sequences:
            sequence = self.waiting[0]
            # A preempted sequence may still await a token; and each running one may soon want a block.
            if sequence.in_flight or not self.blocks.admit(sequence, reserve=len(self.running)):
                return
            self.running.append(self.waiting.pop(0))
            count = min(sequence.pending, budget)
            spans.append(self._plan(sequence, count))
            budget -= count

    def _plan(self, sequence: Sequence, count: int) -> ScheduledSpan:
        start = sequence.computed
        sequence.computed += count
        samples = sequence.computed == sequence.length
        self.blocks.commit(sequence)
        sequence.in_flight += samples
        return ScheduledSpan(sequence, start, start + count, samples)

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self.blocks.release(sequence)
        self.add(sequence)

    def _remove(self, sequence: Sequence) -> None:
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self.blocks.release(sequence)
