"""Which tokens run in the next step.

First every running sequence in the order in which they began, then, with what is left of the budget, those that wait,
by rank (prompt/sampling.py). Nothing overtakes the head of that queue, so of the running sequences at most the last is
still reading its prompt, and a long prompt takes only what decoding leaves. When blocks run out, the last running
sequence gives its own back and waits to be computed again: the first one always gets on, so every sequence gets its
turn.

How many tokens a step has, who passes whom in the queue, and when a step waits for what is yet to come: `policies.py`.
How much of drafts it verifies: `draft_lengths.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass
from functools import cached_property

from tessera.engine.scheduling import policies
from tessera.engine.scheduling.block_manager import BlockManager
from tessera.engine.scheduling.draft_lengths import draft_lengths, tokens_should_be_known
from tessera.engine.scheduling.policies import Load, StepBudget
from tessera.engine.sequence import NOT_FINITE, SampledToken, Sequence

ASK_EVERY = 4
"""How many steps with drafts share one decision whether to wait for tokens: it takes 0.8 ms for 130 answers, and a load
changes more slowly."""


class Scheduler:
    """Plans steps of at most the load's ``max_batched_tokens`` over at most its ``max_sequences`` running sequences.

    Each planned batch must run, in order, and be given to :meth:`apply`; the next may be planned before that.
    """

    def __init__(self, blocks: BlockManager, load: Load) -> None:
        self.blocks = blocks
        self.load = load
        self.waiting, self.running = self.load.waiting, self.load.running
        self.parked: list[Sequence] = []
        self.preemptions = 0
        self._spare_rows = 0  # of the step that is planned: nobody's yet
        self._asked, self._known = 0, False  # how often tokens_should_be_known was, and what it said last

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.parked)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence, behind those of its priority but for what it passes as a follow-up."""
        self.load.record_arrival(sequence.request.sampling.priority, sequence.request.arrival_ns)
        sequence.follows = policies.mostly_cached(self.load, sequence, self.blocks.cached(sequence))
        place = len(self.waiting)
        while place and self._passes(sequence, self.waiting[place - 1]):
            place -= 1
        self.waiting.insert(place, sequence)

    def schedule(self) -> ScheduledBatch:
        """Plans the next step; it is empty when nothing can run before a batch in flight is applied."""
        spans: list[ScheduledSpan] = []
        self._park()
        while (victim := policies.gives_way(self.load, self.blocks)) is not None:
            self._preempt(victim)
        budget = StepBudget.of(self.load)
        drafts = self._drafts(budget)
        drafted = sum(map(len, drafts.values()))
        if drafted:
            budget = budget.beside(drafted)
        self._spare_rows = self.load.max_rows - len(self.running) - len(self.load.admissible()) - drafted
        left = self._plan_running(spans, budget, drafts)
        if not policies.waits_for_burst(self.load, budget):
            self._plan_waiting(spans, budget, left)
        batch = ScheduledBatch(spans, sum(len(span.sequence.draft) for span in spans) if self.load.drafts else 0)
        if batch.tokens > len(spans):
            spans.sort(key=lambda span: span.count > 1)
        return batch

    def must_finish_before_next(self, batch: ScheduledBatch) -> bool:
        """Whether this one should have ended before the next is planned."""
        priorities = (span.sequence.request.sampling.priority for span in batch.spans)
        return policies.must_finish_before_next(self.load, batch.tokens, priorities)

    def tokens_should_be_known(self, batch: ScheduledBatch) -> bool:
        """Whether the tokens of this one should be known before the next is planned."""
        if not any(each.drafting is not None or each.turns > 1 for each in self.running):
            self._asked = 0
            return False
        if self._asked % ASK_EVERY == 0:
            self._known = tokens_should_be_known(self.load, batch.tokens - batch.rows)
        self._asked += 1
        return self._known

    def apply(self, batch: ScheduledBatch, sampled: list[SampledToken]) -> list[tuple[Sequence, list[SampledToken]]]:
        """Gives the batch's sampling sequences their tokens, of each of the batch's ``rows`` one, and releases the
        sequences that ended by them.

        Returns the sequences that took theirs, and what of it is part of the answer: one that ended meanwhile takes
        none.
        """
        taken = []
        for sequence, chosen in zip(batch.sampling, _by_sequence(batch, sampled), strict=True):
            drafted = len(chosen) > 1
            sequence.in_flight -= 1
            if sequence.finish_reason is not None:  # not sequence.finished: once a token
                if chosen[0][0] == NOT_FINITE:
                    self.blocks.invalidate(sequence.block_keys)
                continue
            taken.append((sequence, sequence.take(chosen)))
            if sequence.finish_reason is not None:
                if not sequence.finite:
                    self.blocks.invalidate(sequence.block_keys)
                elif drafted:
                    self.blocks.commit(sequence)
                self._remove(sequence)
            elif drafted or sequence.rewinds:
                self.blocks.shrink(sequence)
        if self.load.drafts and taken:
            self.load.record_pace(sum(len(answer) for _, answer in taken), len(taken))
        return taken

    def offer(self, batch: ScheduledBatch) -> None:
        """What a launched batch's answers have written may be found from now on. Their hashes can wait until the device
        need not."""
        for span in batch.spans:
            if span.end // self.blocks.block_size > span.sequence.committed:
                self.blocks.commit(span.sequence)

    def record_step_time(self, batch: ScheduledBatch, device_ns: int) -> None:
        """How long a planned batch ran."""
        self.load.costs.record(batch.tokens, device_ns)

    def cancel(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence early that has not ended, wherever it is."""
        sequence.finish_reason = reason
        if not sequence.outputs:  # so nobody has seen whether its logits are finite
            self.blocks.invalidate(sequence.offered)
        self._remove(sequence)

    def drop_all(self) -> None:
        """Forgets every sequence and everything cached, whatever state a failed step left behind."""
        for sequence in (*self.waiting, *self.running):
            sequence.block_table = array("q")
        for queue in (self.waiting, self.running, self.parked):
            queue.clear()
        self.blocks.reset()

    def check(self) -> None:
        """Raises AssertionError unless queue, running list and block books agree."""
        everyone = [*self.waiting, *self.running, *self.parked]
        assert len(set(everyone)) == len(everyone), "a sequence is queued twice"
        assert not any(sequence.finished for sequence in everyone), "a finished sequence is queued"
        idle = (*self.waiting, *self.parked)
        assert not any(sequence.block_table for sequence in idle), "a waiting sequence holds blocks"
        reading = [sequence for sequence in self.running if not sequence.rewinds and sequence.pending > 1]
        assert reading in ([], self.running[-1:]), "a sequence overtook one that reads its prompt"
        assert len(self.running) <= self.load.max_sequences, "too many sequences run"
        self.blocks.check(everyone)

    def _park(self) -> None:
        """Takes out of the queues what cannot go on for long, and puts back what can."""
        for sequence in [each for each in self.running if each.parked and not each.in_flight]:
            self._preempt(sequence)
        for sequence in [each for each in self.waiting if each.parked and not each.in_flight]:
            self.waiting.remove(sequence)
            self.parked.append(sequence)
        for sequence in [each for each in self.parked if not each.parked]:
            self.parked.remove(sequence)
            self._wait_first(sequence)

    def _passes(self, sequence: Sequence, other: Sequence) -> bool:
        """Whether a new sequence goes before one that waits."""
        alike = sequence.request.sampling.priority == other.request.sampling.priority
        if sequence.passes(other) or (sequence.request.since_ns and alike and sequence.rank < other.rank):
            return True
        return self.load.rules.cached_first and policies.passes_unread(sequence, other)

    def _drafts(self, budget: StepBudget) -> dict[Sequence, SequenceType[int]]:
        """What the step verifies, of sequences that know their last token: no more than leaves half of its tokens to
        prompts, and nothing where blocks are few, for which others would have to give way."""
        load, blocks = self.load, self.blocks
        able = [
            (each, each.drafting)
            for each in self.running
            if each.drafting is not None and each.outputs and not each.in_flight and each.pending == 1
        ]
        if not able or blocks.free < len(self.running) + len(able) * (1 + blocks.blocks_for(load.drafts)):
            return {}
        proposals = {}
        for each, drafting in able:
            proposal = drafting.propose(each.outputs, min(load.drafts, each.max_tokens - len(each.outputs) - 1))
            if proposal.tokens:
                proposals[each] = proposal
        if not proposals:
            return {}
        pending = [each.pending for each in self.running]
        decoding = pending.count(1)
        unread = sum(pending) - decoding
        most = min(
            load.max_rows - len(self.running) - len(load.admissible()), (load.max_batched_tokens - decoding) // 2
        )
        run = decoding + min(unread, budget.full)
        taken = draft_lengths(load, list(proposals.values()), decoding, run, max(0, most))
        drafts = {
            each: each.verifiable(proposal.tokens[:length])
            for (each, proposal), length in zip(proposals.items(), taken)
            if length
        }
        return {each: draft for each, draft in drafts.items() if draft}

    def _plan_running(
        self, spans: list[ScheduledSpan], budget: StepBudget, drafts: Mapping[Sequence, SequenceType[int]]
    ) -> int:
        """Returns how many tokens are left of the step."""
        left = budget.most
        for sequence in self.running:  # which shrinks from its end when blocks run out
            pending = sequence.pending
            count = pending if pending <= 1 <= left else budget.share(sequence, pending, left)
            draft = drafts.get(sequence, ()) if drafts else ()
            if 1 < count == pending:
                draft = self._certain(sequence, budget.room(sequence, left - count))
                left -= len(draft)
            if count and self._plan(spans, sequence, count, count == pending, draft):
                left -= count
        return left

    def _plan_waiting(self, spans: list[ScheduledSpan], budget: StepBudget, left: int) -> None:
        if self.running and self.running[-1].pending > 1:  # it is still reading, and has had its share
            return
        while self.waiting and len(self.running) < self.load.max_sequences:
            sequence = self.waiting[0]
            # A preempted sequence may still await a token; and each running one may soon want a block.
            if (
                sequence.in_flight
                or not budget.share(sequence, sequence.pending, left)
                or not self.blocks.admit(sequence, reserve=len(self.running))
            ):
                return
            self.running.append(self.waiting.popleft())
            pending = sequence.pending
            count = budget.share(sequence, pending, left)
            draft = self._certain(sequence, budget.room(sequence, left - count)) if count == pending else ()
            self._plan(spans, sequence, count, count == pending, draft)
            left -= count + len(draft)
            if count < pending:
                return

    def _certain(self, sequence: Sequence, most: int) -> SequenceType[int]:
        """What an answer must begin with, at most this many tokens, for the step that reads the end of its prompt to
        run too. Nothing where blocks are few."""
        certain = sequence.certain
        if not certain or self.blocks.free < 2 * (len(self.running) + self.blocks.blocks_for(self.load.drafts)):
            return ()
        most = min(most, self.load.drafts, self._spare_rows, sequence.max_tokens - 1)
        draft = sequence.verifiable(certain[: max(0, most)])
        self._spare_rows -= len(draft)
        return draft

    def _plan(
        self, spans: list[ScheduledSpan], sequence: Sequence, count: int, samples: bool, draft: SequenceType[int] = ()
    ) -> bool:
        """Plans a running sequence's next ``count`` tokens and a draft, at the cost of those behind it where blocks are
        few; False if it was itself preempted."""
        start = sequence.computed
        end = start + count + len(draft)
        while not self.blocks.advance(sequence, end):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        if samples:
            sequence.expect(draft)
        spans.append(ScheduledSpan(sequence, start, end, samples + len(draft)))
        return True

    def _preempt(self, victim: Sequence) -> None:
        """It waits as the first of its priority, and finds again what it has computed, as long as nobody takes it."""
        self.preemptions += 1
        self.running.remove(victim)
        self.blocks.commit(victim)
        self.blocks.release(victim)
        self._wait_first(victim)

    def _wait_first(self, sequence: Sequence) -> None:
        place = 0
        while place < len(self.waiting) and self.waiting[place].passes(sequence):
            place += 1
        self.waiting.insert(place, sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.outputs:
            self.load.record_answer(sequence)
        next(each for each in (self.running, self.waiting, self.parked) if sequence in each).remove(sequence)
        self.blocks.release(sequence)


def _by_sequence(batch: ScheduledBatch, sampled: list[SampledToken]) -> Iterator[list[SampledToken]]:
    first = 0
    for span in batch.spans:
        if span.samples:
            yield sampled[first : first + span.samples]
            first += span.samples


@dataclass(slots=True)  # not frozen: one is made for every token, and that takes three times as long
class ScheduledSpan:
    """Positions [start, end) of one sequence; the step chooses the tokens after the last ``samples`` of them: none
    where a prompt goes on, one, or one more than are drafted."""

    sequence: Sequence
    start: int
    end: int
    samples: int

    @property
    def count(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ScheduledBatch:
    """The spans of one step, packed one after the other; those of a single token come first. ``drafted``: how many
    tokens of drafts are among them."""

    spans: list[ScheduledSpan]
    drafted: int = 0

    @cached_property
    def tokens(self) -> int:
        return sum(span.end - span.start for span in self.spans)

    @property
    def rows(self) -> int:
        """Tokens that are chosen."""
        return len(self.sampling) + self.drafted

    @cached_property
    def sampling(self) -> list[Sequence]:
        """The sequences that get tokens, in the batch's order."""
        return [span.sequence for span in self.spans if span.samples]
