"""Which tokens run in the next step.

First every running sequence in the order in which they began, then, with what is left of the budget, those that wait,
by rank (ranking.py). Nothing overtakes the head of that queue, so of the running sequences at most the last is still
reading its prompt, and a long prompt takes only what decoding leaves. When blocks run out, the last running sequence
gives its own back and waits to be computed again: the first one always gets on, so every sequence gets its turn.

A follow-up, a prompt of which the cache leaves little to read, is put before those of its priority that came shortly
before it and are not follow-ups themselves. Else whoever asks several questions about a picture waits until all others
are through with their first, and then all ask their second together: the GPU has everybody's costly prompts at once,
and later cheap ones, in small steps.

Where sequences of several priorities come, the better one waits for the step under way and no more: while such a one
is expected no step is launched behind a long one, and that which reads its prompt is short; where the others fill the
house, or a long prompt of theirs is half read, the last of them gives way. Where answers are long, prompts are read in
short steps.

What one step runs.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

from tessera.engine.kv_cache.block_manager import BlockManager
from tessera.engine.sequence import NOT_FINITE, Report, SampledToken, Sequence
from tessera.prompt.sampling import Expected

# As long as no request is this far behind the one before, they are taken to be of one burst. Where answers are short,
# steps run for the prompts' sake, and the fewer the better; where they are long, steps run anyway, and a prompt that
# waits only holds up its own answer.
_QUIET_NS = 12_000_000
_QUIET_BESIDE_LONG_ANSWERS_NS = 3_000_000
_SHORT = 16  # tokens of an answer
# But none waits for the others longer than that.
_LONGEST_WAIT_NS = 100_000_000
# No step is launched behind one of so long: the later it is planned the more it knows of, and the less it is in the
# way.
_LONG_NS = 50_000_000
# Where full steps are long and answers too, steps read only this many tokens of prompts: the weights are read for those
# that decode anyway, which takes about as long. And prompts that share a step are answered together, so that their
# callers' next ones come together again, and the first waits for the last.
_BESIDE_LONG_ANSWERS = 192
# But at least this part of what could be read now: else prompts could come faster than they are read. Were it more,
# those that came together would go on together.
_SPREAD = 16
# And as many, a few less if that is nearer, as fill a graph and its products' tiles: those of short steps come in so
# many tokens, and one of 202 costs what 256 do.
_TILE = 64
# Where full steps are long and answers short, a step that begins at least N prompts has this part of its tokens.
# They are answered together, and who just missed them is answered a step later: the shorter the steps, the more equal
# the latencies; fewer prompts are a small part of all in flight anyway. Of 8,192 tokens it is 5,888, at which
# InternVL3-8B's products fill their waves of tiles on an H200 as well as with all. A job beside questions keeps full
# steps: with these, questions would wait 141 ms instead of 168, but it would lose 3.1 % instead of 1.1 (simulated).
_MANY = 16
_EVEN_PART = 23 / 32
# A follow-up passes what came at most so long before it.
_PASSED_NS = 1_000_000_000
# Prompts that fill this part of a step say what a token takes; less would mostly say what a step costs anyway.
_TELLING_PART = 8


class Scheduler:
    """Plans steps of at most ``max_batched_tokens`` tokens over at most ``max_sequences`` running sequences.

    ``gathers``: prompts that come in quick succession while others run wait for the rest of them, so that they share a
    step: a GPU reads all weights for each step, however few its tokens.

    Each planned batch must run, in order, and be given to :meth:`apply`; the next may be planned before that.
    """

    def __init__(
        self, blocks: BlockManager, max_batched_tokens: int, max_sequences: int, gathers: bool = False
    ) -> None:
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.parked: list[Sequence] = []
        self.preemptions = 0
        self._max_batched_tokens = max_batched_tokens
        self._max_sequences = max_sequences
        self._gathers = gathers
        # Never so few that decodes could keep every prompt out.
        self._least_tokens = min(max_batched_tokens, 2 * max_sequences)
        self._ns_a_token: deque[float] = deque(maxlen=8)  # in the steps of late that tell
        self._full_tokens = max_batched_tokens  # of the next step, for prompts that nobody is waiting for
        self._expected = Expected()
        # Priorities: of all so far, and of those that the next step is short for.
        self._worst = self._hurried = -(2**63)
        self._short_share = 1.0  # of the answers of late

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.parked)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence, behind those of its priority but for what it passes as a follow-up."""
        priority = sequence.request.sampling.priority
        self._expected.saw(priority, sequence.request.arrival_ns)
        self._worst = max(self._worst, priority)
        cached = self.blocks.cached(sequence)
        unread = sequence.prompt_length - cached
        sequence.follows = unread <= min(cached, self._least_tokens)
        place = len(self.waiting)
        while place and (sequence.passes(self.waiting[place - 1]) or _passes_unread(sequence, self.waiting[place - 1])):
            place -= 1
        self.waiting.insert(place, sequence)

    def schedule(self) -> ScheduledBatch:
        """Plans the next step; it is empty when nothing can run before a batch in flight is applied."""
        spans: list[ScheduledSpan] = []
        self._park()
        self._make_way()
        self._hurried, self._full_tokens = self._in_a_hurry(), self._full_step()
        budget = self._plan_running(spans, self._max_batched_tokens)
        if not self._more_follow():
            self._plan_waiting(spans, budget)
        spans.sort(key=lambda span: span.count > 1)
        return ScheduledBatch(spans)

    def ends_first(self, batch: ScheduledBatch) -> bool:
        """Whether this one should have ended before the next is planned."""
        if batch.tokens <= self._least_tokens:
            return False
        if self._is_long(batch.tokens):
            return True
        return self._expected.above(max(span.sequence.request.sampling.priority for span in batch.spans))

    def apply(
        self, batch: ScheduledBatch, sampled: SequenceType[SampledToken]
    ) -> list[tuple[Sequence, int | None, Report | None]]:
        """Gives the batch's sampling sequences their tokens, and releases the sequences that ended by them.

        Returns the sequences that took theirs, what it adds to the answer, and its report: one that ended meanwhile
        takes none.
        """
        taken = []
        for sequence, (token, report) in zip(batch.sampling, sampled, strict=True):
            sequence.in_flight -= 1
            if token == NOT_FINITE:
                self.blocks.spoil(sequence.block_keys)
            if sequence.finished:
                continue
            taken.append((sequence, token if sequence.take(token, report) else None, report))
            if sequence.finished:
                self._remove(sequence)
            elif sequence.rewinds:
                self.blocks.shrink(sequence)
        return taken

    def took(self, batch: ScheduledBatch, device_ns: int) -> None:
        """How long a planned batch ran."""
        read = sum(span.count for span in batch.spans if span.count > 1)
        if read >= max(batch.tokens // 2, self._max_batched_tokens // _TELLING_PART):
            self._ns_a_token.append(device_ns / batch.tokens)

    def cancel(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence early that has not ended, wherever it is."""
        sequence.finish_reason = reason
        if not sequence.outputs:  # so nobody has seen whether its logits are finite
            self.blocks.spoil(sequence.offered)
        self._remove(sequence)

    def drop_all(self) -> None:
        """Forgets every sequence and everything cached, whatever state a failed step left behind."""
        for sequence in (*self.waiting, *self.running):
            sequence.block_table = array("q")
        self.waiting, self.running, self.parked = deque(), [], []
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
        assert len(self.running) <= self._max_sequences, "too many sequences run"
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

    def _make_way(self) -> None:
        """Takes from the running, last first, what holds up a better priority that waits."""
        while self.waiting and (victim := self._outranked(self.waiting[0])):
            # Each running one may take a block in this step, and soon want another.
            full = len(self.running) >= self._max_sequences or not self.blocks.fits(
                self.waiting[0], reserve=2 * len(self.running)
            )
            # What it has read is found again at its next turn.
            long_prompt = victim.pending > self._least_tokens and self.blocks.keeps(victim)
            if not full and not long_prompt:
                return
            self._preempt(victim)

    def _outranked(self, head: Sequence) -> Sequence | None:
        """The last running sequence that ``head`` passes."""
        if head.request.sampling.priority >= self._worst:
            return None
        return next((sequence for sequence in reversed(self.running) if head.passes(sequence)), None)

    def _in_a_hurry(self) -> int:
        """The best priority of those that a long step would hold up; the worst there is where nobody differs."""
        if not self._expected.above(self._worst):
            return self._worst
        held_up = [each for each in self.running if each.pending > 1 or len(each.outputs) > _SHORT]
        return min(
            (each.request.sampling.priority for each in (*held_up, *list(self.waiting)[:1])), default=self._worst
        )

    def _share(self, sequence: Sequence, pending: int, budget: int) -> int:
        """How many of its pending tokens a step takes that has this many left."""
        if pending > 1:
            budget -= self._max_batched_tokens - self._step_tokens(sequence.request.sampling.priority)
        return max(0, min(pending, budget))

    def _step_tokens(self, priority: int) -> int:
        """How many tokens a step may have for prompts of this priority: few where a better one waits for what the step
        gives it, its first token, or the next one of an answer that is read as it comes."""
        if self._hurried < priority:
            return min(self._least_tokens, self._full_tokens)
        return self._full_tokens

    def _full_step(self) -> int:
        """The same where nobody is waiting for the step."""
        if not self._is_long(self._max_batched_tokens):
            return self._max_batched_tokens
        if self._answers_are_short:
            # A follow-up takes little but waits for the whole step, and its caller's next question with it.
            follow = any(sequence.follows for sequence in chain(self.running, self.waiting))
            if follow:
                return max(self._least_tokens, self._max_batched_tokens // 2)
            if not self._begins_many() or self._expected.above(self.waiting[-1].request.sampling.priority):
                return self._max_batched_tokens
            return max(self._least_tokens, int(_EVEN_PART * self._max_batched_tokens) // _TILE * _TILE)
        reading = [sequence for sequence in self.running[-1:] if sequence.pending > 1]
        admissible = islice(self.waiting, self._max_sequences - len(self.running))
        unread = sum(sequence.pending for sequence in (*reading, *admissible))
        tokens = len(self.running) - len(reading) + max(_BESIDE_LONG_ANSWERS, unread // _SPREAD)
        return min((tokens + _TILE // 2) // _TILE * _TILE, self._max_batched_tokens)

    def _begins_many(self) -> bool:
        """Whether a step of all tokens would begin many of the prompts that wait."""
        left = self._max_batched_tokens - sum(sequence.pending for sequence in self.running)
        begun = 0
        for sequence in islice(self.waiting, self._max_sequences - len(self.running)):
            if left <= 0:
                break
            left -= sequence.pending
            begun += 1
        return begun >= _MANY

    def _is_long(self, tokens: int) -> bool:
        """Whether a step of N tokens takes long, by the fastest of the last that told: others had company on the
        GPU."""
        return bool(self._ns_a_token) and tokens * min(self._ns_a_token) > _LONG_NS

    @property
    def _answers_are_short(self) -> bool:
        return self._short_share > 0.5

    def _plan_running(self, spans: list[ScheduledSpan], budget: int) -> int:
        """Returns what is left of the budget."""
        for sequence in self.running:  # which shrinks from its end when blocks run out
            pending = sequence.pending
            count = self._share(sequence, pending, budget)
            if count and self._make_room(sequence, sequence.computed + count):
                spans.append(self._plan(sequence, count, count == pending))
                budget -= count
        return budget

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Grows a running sequence, at the cost of those behind it; False if it was itself preempted."""
        while not self.blocks.grow(sequence, tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _plan_waiting(self, spans: list[ScheduledSpan], budget: int) -> None:
        if self.running and self.running[-1].pending > 1:  # it is still reading, and has had its share
            return
        while self.waiting and len(self.running) < self._max_sequences:
            sequence = self.waiting[0]
            # A preempted sequence may still await a token; and each running one may soon want a block.
            if (
                sequence.in_flight
                or not self._share(sequence, sequence.pending, budget)
                or not self.blocks.admit(sequence, reserve=len(self.running))
            ):
                return
            self.running.append(self.waiting.popleft())
            pending = sequence.pending
            count = self._share(sequence, pending, budget)
            spans.append(self._plan(sequence, count, count == pending))
            budget -= count
            if count < pending:
                return

    def _more_follow(self) -> bool:
        """Whether prompts that wait should go on waiting for others."""
        if not (self._gathers and self.running and self.waiting):
            return False
        if len(self.running) + len(self.waiting) >= self._max_sequences:  # there is no room for others
            return False
        head = self.waiting[0]
        if head.passes(self.waiting[-1]) or self._outranked(head):
            return False
        now, tokens, enough = time.monotonic_ns(), 0, self._step_tokens(head.request.sampling.priority)
        arrivals = [sequence.request.arrival_ns for sequence in self.waiting]
        newest, oldest = max(arrivals), min(arrivals)
        quiet = _QUIET_NS if self._answers_are_short else _QUIET_BESIDE_LONG_ANSWERS_NS
        if now - newest > quiet or now - oldest > _LONGEST_WAIT_NS:
            return False
        for sequence in self.waiting:
            tokens += sequence.pending
            if tokens >= enough:
                return False
        return True

    def _plan(self, sequence: Sequence, count: int, samples: bool) -> ScheduledSpan:
        start = sequence.computed
        sequence.computed = end = start + count
        self.blocks.commit(sequence)
        if samples:
            sequence.expect()
        return ScheduledSpan(sequence, start, end, samples)

    def _preempt(self, victim: Sequence) -> None:
        """It waits as the first of its priority."""
        self.preemptions += 1
        self.running.remove(victim)
        self.blocks.release(victim)
        self._wait_first(victim)

    def _wait_first(self, sequence: Sequence) -> None:
        place = 0
        while place < len(self.waiting) and self.waiting[place].passes(sequence):
            place += 1
        self.waiting.insert(place, sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.outputs:
            self._short_share += ((len(sequence.outputs) <= _SHORT) - self._short_share) / 16
        next(each for each in (self.running, self.waiting, self.parked) if sequence in each).remove(sequence)
        self.blocks.release(sequence)


def _passes_unread(sequence: Sequence, other: Sequence) -> bool:
    """Whether a follow-up goes before one of its priority that came earlier, is not one itself and has not begun."""
    if not sequence.follows or other.follows or other.scheduled_ns:
        return False
    of_one = sequence.request.sampling.priority == other.request.sampling.priority
    return of_one and sequence.request.arrival_ns - other.request.arrival_ns <= _PASSED_NS


@dataclass(slots=True)  # not frozen: one is made for every token, and that takes three times as long
class ScheduledSpan:
    """Positions [start, end) of one sequence; ``samples`` when the step chooses the token after them."""

    sequence: Sequence
    start: int
    end: int
    samples: bool

    @property
    def count(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ScheduledBatch:
    """The spans of one step, packed one after the other; those of a single token come first."""

    spans: list[ScheduledSpan]

    @property
    def tokens(self) -> int:
        return sum(span.count for span in self.spans)

    @cached_property
    def sampling(self) -> list[Sequence]:
        """The sequences that get a token, in the batch's order."""
        return [span.sequence for span in self.spans if span.samples]
