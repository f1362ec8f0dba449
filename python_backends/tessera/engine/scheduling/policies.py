"""The scheduler's rules, one function or class each, with the figure that each has earned and a switch in `Rules`.

W1, W4a and the other workloads: docs/figures.md. What was measured how, and against what: docs/gpu.md. ``make bench
NAME=scheduler ARGS="--without even_steps"`` simulates a rule's absence without a GPU.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from statistics import median

from tessera.engine.scheduling.block_manager import BlockManager
from tessera.engine.sequence import Sequence
from tessera.prompt.sampling import RecentPriority

SHORT_ANSWER = 16  # tokens
# A step that takes longer is long: the later the next is planned the more it knows of, and the less it is in the way.
LONG_NS = 50_000_000
# As long as no request is this far behind the one before, they are taken to be of one burst. Where answers are short,
# steps run for the prompts' sake, and the fewer the better; where they are long, steps run anyway, and a prompt that
# waits only holds up its own answer.
BURST_GAP_NS = 12_000_000
BURST_GAP_BESIDE_LONG_ANSWERS_NS = 3_000_000
LONGEST_BURST_NS = 100_000_000  # but none waits for the others longer than that
MOST_PASSED_NS = 1_000_000_000
LEAST_CHUNK, LEAST_CHUNK_OF_EXPERTS = 192, 1024  # tokens
LEAST_CHUNK_PART = 16
TILE = 64
EVEN_PROMPTS = 16
EVEN_PART = 23 / 32
_PACE = 1 / 16  # so fast the expected pace of answers follows a step's
_RECENT = 8  # steps; others had company on the GPU
_FADING = 511 / 512  # a step
_FADED = 1 / 4


@dataclass(frozen=True)
class Rules:
    """Which rules hold; all but where a simulation turns one off, or a runner has no use for it.

    ``bursts``: :func:`waits_for_burst`. ``cached_first``: :func:`passes_unread`. ``short_chunks``, ``half_steps`` and
    ``even_steps``: :func:`prompt_tokens`. ``urgency``: :class:`StepBudget`. ``preemption``: :func:`gives_way`.
    ``awaited_steps``: :func:`must_finish_before_next`.
    """

    bursts: bool = True
    cached_first: bool = True
    short_chunks: bool = True
    half_steps: bool = True
    even_steps: bool = True
    urgency: bool = True
    preemption: bool = True
    awaited_steps: bool = True


EVERY_RULE = Rules()


class CostModel:
    """The time of a step by its tokens: of each power of two the fastest of the recent steps, and straight lines
    between. Where nothing is known a step costs nothing.

    ``measured``: tokens and nanoseconds of steps at start-up.
    """

    def __init__(self, measured: Iterable[tuple[int, int]] = ()) -> None:
        self._recent: dict[int, deque[tuple[float, int]]] = {}  # by power of two: ns a token, tokens
        self._fastest: dict[int, tuple[float, int]] = {}
        self._tokens: list[float] = [0.0]
        self._ns: list[float] = [0.0]
        self._best_rate = 0.0  # ns a token, of all steps so far
        for tokens, ns in measured:
            self.record(tokens, ns)

    def record(self, tokens: int, ns: int) -> None:
        """A step of this many tokens took this long."""
        self._best_rate = min(self._best_rate or ns / tokens, ns / tokens)
        power = (tokens - 1).bit_length()
        recent = self._recent.setdefault(power, deque(maxlen=_RECENT))
        recent.append((ns / tokens, tokens))
        if (fastest := min(recent)) != self._fastest.get(power):
            self._fastest[power] = fastest
            known = sorted((tokens, ns_a_token * tokens) for ns_a_token, tokens in self._fastest.values())
            self._tokens = [0.0, *(tokens for tokens, _ in known)]
            # One that was held up, as by a compilation, took no longer by itself than those of more tokens.
            self._ns = [0.0, *[*accumulate((ns for _, ns in reversed(known)), min)][::-1]]

    def step_ns(self, tokens: float) -> float:
        """How long a step of this many tokens takes; beyond those known in proportion."""
        place = min(bisect_left(self._tokens, tokens), len(self._tokens) - 1)
        more, longer = self._tokens[place], self._ns[place]
        if not place:
            return 0.0
        if tokens >= more:
            return longer * tokens / more
        fewer, shorter = self._tokens[place - 1], self._ns[place - 1]
        return shorter + (longer - shorter) * (tokens - fewer) / (more - fewer)

    def full_step_ns(self, tokens: int) -> float:
        """What the largest step would take at the best rate so far. :meth:`step_ns` might go by a few of other sizes
        that were slow, as those of a load's first burst are beside the tower, and what seems long is not run: nothing
        would put it right."""
        return self._best_rate * tokens


class Recent:
    """The median of the last times of some kind of step, ``ns``: those of one load differ by what there is to mask. As
    long as other kinds run it fades, so that this one is tried again; what has faded is not counted with the next."""

    def __init__(self) -> None:
        self.ns = 0.0
        self._times: deque[int] = deque(maxlen=_RECENT)
        self._kept = 1.0

    def record(self, ns: int) -> None:
        if self._kept < _FADED:
            self._times.clear()
        self._kept = 1.0
        self._times.append(ns)
        self.ns = median(self._times)

    def fade(self) -> None:
        self._kept *= _FADING
        self.ns *= _FADING


class Load:
    """What the rules look at: the limits, the queues, and what steps and arrivals so far have told."""

    def __init__(
        self,
        max_batched_tokens: int,
        max_sequences: int,
        rules: Rules = EVERY_RULE,
        costs: CostModel | None = None,
        drafts: int = 0,
        max_rows: int = 0,
        least_chunk: int = LEAST_CHUNK,
    ) -> None:
        """``drafts``: the most tokens drafted for one sequence; ``max_rows``: rows that a step may choose tokens for,
        where any are drafted; ``least_chunk``: tokens of prompts that a step has beside long answers."""
        self.max_batched_tokens = max_batched_tokens
        self.max_sequences = max_sequences
        self.drafts, self.max_rows, self.least_chunk = drafts, max_rows, least_chunk
        self.pace = 1.0  # tokens that an answer gets of a step: more than one by drafts
        #: of the device between two steps, where the second is planned once the tokens of the first are known
        self.between = Recent()
        #: of the host with a step, its launch too, by whether it knew the tokens of the one before; a device that is
        #: faster waits for it
        self.busy = {False: Recent(), True: Recent()}
        self.rules = rules
        self.costs = costs or CostModel()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        # Never so few that decodes could keep every prompt out.
        self.least_tokens = min(max_batched_tokens, 2 * max_sequences)
        self.expected = RecentPriority()
        self.worst_priority = -(2**63)  # of all so far
        # Of the recent answers, by the power of two of the tokens asked for: tenants with long answers and tenants with
        # short ones mostly differ in these, and then the one's do not speak for the other's.
        self._short_share: dict[int, float] = {}

    def record_host_time(self, known: bool, ns: int) -> None:
        """Taking a step's tokens, planning the next and launching it took this long; ``known``: whether those tokens
        were, by then."""
        self.busy[known].record(ns)
        self.busy[not known].fade()
        if not known:
            self.between.fade()

    def record_pace(self, tokens: int, answers: int) -> None:
        """A step gave this many answers this many tokens; to labels none, which says nothing of others' pace."""
        self.pace += (max(1.0, tokens / answers) - self.pace) * _PACE

    def record_arrival(self, priority: int, arrival_ns: int) -> None:
        self.expected.saw(priority, arrival_ns)
        self.worst_priority = max(self.worst_priority, priority)

    def is_long(self, tokens: int) -> bool:
        """Whether a step of N tokens takes long."""
        return self.costs.step_ns(tokens) > LONG_NS

    def record_answer(self, sequence: Sequence) -> None:
        """A sequence has ended that has said something."""
        asked = sequence.max_tokens.bit_length()
        share = self._short_share.get(asked, 1.0)
        self._short_share[asked] = share + ((len(sequence.outputs) <= SHORT_ANSWER) - share) / 16

    def _is_short(self, sequence: Sequence) -> bool:
        """Whether an answer that has just begun is likely to be: by others that were asked for as much."""
        return sequence.max_tokens <= SHORT_ANSWER or self._short_share.get(sequence.max_tokens.bit_length(), 1) > 0.5

    @property
    def answers_are_short(self) -> bool:
        """Whether most are of those that run or could; decided by these alone at each step."""
        everyone = [*self.running, *self.admissible()]
        short = sum(len(each.outputs) <= SHORT_ANSWER and self._is_short(each) for each in everyone)
        return not everyone or 2 * short > len(everyone)

    def admissible(self) -> list[Sequence]:
        """Those that wait and for which there are places."""
        return list(islice(self.waiting, self.max_sequences - len(self.running)))

    def outranked_by_head(self) -> Sequence | None:
        """The last running sequence that the head of the queue passes."""
        if not self.waiting or self.waiting[0].request.sampling.priority >= self.worst_priority:
            return None
        return next((sequence for sequence in reversed(self.running) if self.waiting[0].passes(sequence)), None)


def gives_way(load: Load, blocks: BlockManager) -> Sequence | None:
    """The last running sequence, where it holds up a better priority that waits: by its place or its blocks in a full
    house, or as a long prompt that is half read and found again at its next turn.

    With ``urgency`` and what the vision stage does, a question beside W1 at a worse priority waits about 200 ms for its
    first token instead of 1,544, and the job loses 1.8 to 2.8 %.
    """
    if not load.rules.preemption or (victim := load.outranked_by_head()) is None:
        return None
    # Each running one may take a block in this step, and soon want another.
    full = len(load.running) >= load.max_sequences or not blocks.fits(load.waiting[0], reserve=2 * len(load.running))
    long_prompt = victim.pending > load.least_tokens and blocks.keeps(victim)
    return victim if full or long_prompt else None


def must_finish_before_next(load: Load, tokens: int, priorities: Iterable[int]) -> bool:
    """Whether a step of N tokens, for these priorities, should have ended before the next is planned.

    With the vision stage's forwards one at a time W1 has 127.3 req/s instead of 120.7 to 122.4; alone 121.9.
    """
    if not load.rules.awaited_steps or tokens <= load.least_tokens:
        return False
    return load.is_long(tokens) or load.expected.above(max(priorities))


def mostly_cached(load: Load, sequence: Sequence, cached: int) -> bool:
    """Whether a sequence with this many cached positions is a follow-up: the cache leaves little of it to read."""
    return sequence.prompt_length - cached <= min(cached, load.least_tokens)


def passes_unread(sequence: Sequence, other: Sequence) -> bool:
    """Whether a follow-up goes before one of its priority that came earlier, is not one itself and has not begun.

    Else a client with several questions about a picture waits until all others are through with their first, and then
    all ask their second together: the GPU has everybody's costly prompts at once, and later cheap ones, in small
    steps. W6 320 -> 382 req/s, in FP8 392 -> 570 (with ``half_steps``); simulated 331 -> 354 alone.
    """
    if not sequence.follows or other.follows or other.scheduled_ns:
        return False
    of_one = sequence.request.sampling.priority == other.request.sampling.priority
    return of_one and sequence.request.arrival_ns - other.request.arrival_ns <= MOST_PASSED_NS


def prompt_tokens(load: Load) -> int:
    """How many tokens the next step has where nobody of a better priority waits for it: fewer than all only where a
    full step would be long."""
    if load.costs.full_step_ns(load.max_batched_tokens) <= LONG_NS:
        return load.max_batched_tokens
    if not load.answers_are_short:
        return _short_chunk(load) if load.rules.short_chunks else load.max_batched_tokens
    if any(sequence.follows for sequence in chain(load.running, load.waiting)):
        return _half_step(load) if load.rules.half_steps else load.max_batched_tokens
    return _even_step(load) if load.rules.even_steps else load.max_batched_tokens


def _short_chunk(load: Load) -> int:
    """Beside long answers: the weights are read for those that decode anyway, which takes about as long as 192 tokens
    of prompts (InternVL3-8B's shape on an H200, in bf16 and in FP8). W4a 8,963 -> 9,217 and 9,208 tok/s, first token
    361 -> 172 and 84 ms. What takes 5/3 of a decode's time by the cost model is more tokens, and loses where a step is
    short: MinerU2.5's shape, 10 in flight, 4,374 and 4,378 tok/s against 4,795 and 4,475 with 192, first token 186 and
    213 ms against 142 and 201 (W4a's 107 and 104 against 86 and 95).

    And prompts that share a step are answered together, so that their callers' next ones come together again, and the
    first waits for the last. But at least a sixteenth of what could be read now: else prompts could come faster than
    they are read; were it more, those that came together would go on together (simulated only). And the nearest
    multiple of 64, which graphs and the tiles of their products have: 202 tokens cost what 256 do (W4b +0.3 % in
    turns, W4a 9,208 -> 9,722 across hosts).

    Those that decode read only the experts that they see, and 192 tokens of prompts nearly all of them, each for a few
    rows: a body with experts has 1,024. W7b with InternVL3.5-30B-A3B's shape 1,132 -> 1,410 tok/s.

    Where drafts give an answer several tokens a step, answers end that much sooner, and as many more prompts must be
    read: else places stay empty. JSON by one schema, 64 in flight: of 42 answers a step to 55, 66 -> 71 a second
    (simulated only).
    """
    reading = [sequence for sequence in load.running[-1:] if sequence.pending > 1]
    unread = sum(sequence.pending for sequence in (*reading, *load.admissible()))
    decoding = len(load.running) - len(reading)
    tokens = decoding + max(int(load.least_chunk * load.pace), unread // LEAST_CHUNK_PART)
    return min((tokens + TILE // 2) // TILE * TILE, load.max_batched_tokens)


def _half_step(load: Load) -> int:
    """Beside a follow-up: it takes little but waits for the whole step, and its caller's next question with it.

    Simulated: W6 354 -> 395 req/s with ``cached_first``, 331 -> 334 alone; W1 loses 2 % if all share a prefix.
    Today's code without it: 394 -> 362 req/s, first token 203 -> 442 ms (simulated).
    """
    return max(load.least_tokens, load.max_batched_tokens // 2)


def _even_step(load: Load) -> int:
    """Where a step would begin at least 16 prompts: they are answered together, and who just missed them is answered a
    step later, so the shorter the steps, the more equal the latencies; fewer prompts are a small part of all in flight
    anyway. W1's rate is unchanged, its p99 / p50 goes from 1.07..1.12 to 1.03.

    Of 8,192 tokens it is 5,888, at which InternVL3-8B's products fill their waves of tiles on an H200 as well as with
    all. A job beside questions keeps full steps: with these, questions would wait 141 ms instead of 168, but it would
    lose 3.1 % instead of 1.1 (simulated).

    Simulated without it: p99 / p50 1.08 instead of 1.00; with 6,016 tokens for all steps 1.00, but then a job loses
    3.14 % beside questions instead of 0.79, and a question waits 147 ms instead of 176.
    """
    left = load.max_batched_tokens - sum(sequence.pending for sequence in load.running)
    first = load.admissible()[:EVEN_PROMPTS]
    begins_many = len(first) == EVEN_PROMPTS and sum(sequence.pending for sequence in first[:-1]) < left
    if not begins_many or load.expected.above(load.waiting[-1].request.sampling.priority):
        return load.max_batched_tokens
    return max(load.least_tokens, int(EVEN_PART * load.max_batched_tokens) // TILE * TILE)


@dataclass(frozen=True)
class StepBudget:
    """How many tokens a step may have for prompts: ``full``, but only ``short`` for those of a worse priority than
    ``urgent``. So the step that gives a question its first token is short, and so are those that give it the next
    ones of an answer that is read as it comes. ``most`` is the limit of all steps."""

    most: int
    full: int
    short: int
    urgent: int

    @classmethod
    def of(cls, load: Load) -> StepBudget:
        full = prompt_tokens(load)
        return cls(load.max_batched_tokens, full, min(load.least_tokens, full), _urgent_priority(load))

    def tokens(self, priority: int) -> int:
        return self.short if self.urgent < priority else self.full

    def beside(self, drafted: int) -> StepBudget:
        """What drafts of this many tokens leave of the step: about as many for prompts as without them, where they fit,
        and whole tiles with them."""
        most, tiles = self.most - drafted, (self.full + drafted + TILE // 2) // TILE
        return StepBudget(most, min(tiles * TILE - drafted, most), min(self.short, most), self.urgent)

    def share(self, sequence: Sequence, pending: int, left: int) -> int:
        """How many of its pending tokens a step takes that has this many left."""
        return min(pending, self.room(sequence, left) if pending > 1 else left)

    def room(self, sequence: Sequence, left: int) -> int:
        """How many tokens for a prompt's sake a step has left, of these."""
        return max(0, left - self.most + self.tokens(sequence.request.sampling.priority))


def _urgent_priority(load: Load) -> int:
    """The best priority of those that a long step would hold up; the worst there is where nobody differs."""
    if not load.rules.urgency or not load.expected.above(load.worst_priority):
        return load.worst_priority
    held_up = [each for each in load.running if each.pending > 1 or len(each.outputs) > SHORT_ANSWER]
    return min(
        (each.request.sampling.priority for each in (*held_up, *islice(load.waiting, 1))), default=load.worst_priority
    )


def waits_for_burst(load: Load, budget: StepBudget) -> bool:
    """Whether prompts that wait should go on waiting for others, to share a step with them.

    A GPU reads all weights for each step, however few its tokens: W1 117 (3 ms) -> 122 req/s, in FP8 161 (no waiting)
    and 170 (3 ms) -> 179. Beside long answers 3 ms and not 12: W4b (4-bit) +6 %, first token 94 -> 55 ms; and no longer
    than a step of these, which is what sharing can spare.
    """
    if not (load.rules.bursts and load.running and load.waiting):
        return False
    if len(load.running) + len(load.waiting) >= load.max_sequences:  # there is no room for others
        return False
    if load.waiting[0].passes(load.waiting[-1]) or load.outranked_by_head():
        return False
    now = time.monotonic_ns()
    arrivals = [sequence.request.arrival_ns for sequence in load.waiting]
    gap: float = BURST_GAP_NS
    if not load.answers_are_short:
        gap = min(BURST_GAP_BESIDE_LONG_ANSWERS_NS, load.costs.step_ns(len(load.running)))
    if now - max(arrivals) > gap or now - min(arrivals) > LONGEST_BURST_NS:
        return False
    return sum(sequence.pending for sequence in load.waiting) < budget.tokens(load.waiting[0].request.sampling.priority)
