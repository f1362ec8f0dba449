"""What the scheduler's rules do to a closed loop, without a GPU: the scheduler itself, with steps that take as long as
they were measured to take (`make bench NAME=scheduler`).

    python loadtest/bench scheduler --concurrency 64 --prompt 316 --answer 256
    python loadtest/bench scheduler --concurrency 256 --answer 4 --questions 4
    python loadtest/bench scheduler --mix 92                        the load's open loop of 98 % short answers
    python loadtest/bench scheduler --concurrency 96 --answer 4 --long-callers 32    two tenants

Steps' times are InternVL3-8B's shape in bf16 on one H200 (2026-11-23). A forward of vision takes its time from the
language model's steps. Questions about one picture come one after the other; from the second on the picture has its
rows and its keys and values. What is not known here: how the two processes slow each other, and the host. Simulated
rates were 2 to 7 % above measured ones.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import counting
import figures
import numpy as np
import open_loop

from tessera.engine.scheduling import policies
from tessera.engine.scheduling.block_manager import BlockManager
from tessera.engine.scheduling.policies import EVERY_RULE, Load, Rules
from tessera.engine.scheduling.scheduler import ScheduledBatch, Scheduler
from tessera.engine.sequence import Request, Sequence
from tessera.prompt.sampling import SamplingParameters

TOKENS = (0, 64, 128, 256, 320, 576, 8192)
STEP_MS = (4.1, 4.85, 5.9, 7.8, 9.7, 15.1, 171.0)
TILE_MS = 1.45  # of the GPU's time
FORWARD_TILES = 16
PREPROCESS_MS = 5.0
OWN_TOKENS = 21  # at the end of a prompt, of which a picture's next question has others
PICTURE_START = 12  # in a prompt
SKIPPED_MS = 10_000.0


def step_ms(tokens: int) -> float:
    """Of a step of this many tokens; those of more than 64 come in graphs of multiples of that."""
    return float(np.interp(tokens if tokens <= 64 else -(-tokens // 64) * 64, TOKENS, STEP_MS))


class Kind(NamedTuple):
    """What a request has of each: its picture's tiles, its prompt's tokens, its answer's."""

    tiles: int
    prompt: int
    answer: int
    name: str = "short"


LONG = Kind(9, 2364, 256, "long")  # a picture of 1920 x 1080 pixels
MIX_PROMPTS = {"short": 316, "long_prompt": 2316, "long_answer": 316}  # of open_loop's kinds


@dataclass(frozen=True)
class Options:
    """`concurrency` requests in a closed loop, of `tiles` and `prompt` and `answer` tokens, `questions` of them about
    each picture, one after the other; beside them `long_callers` of a large picture. `mix`: in place of all these so
    many requests a second of the load's open loop. `step_time`: times that in bf16, in FP8 about 0.6; `hand_over_ms`:
    from vision to the language model, one request at a time. What ran for the first 10 of the `seconds` does not count.
    """

    concurrency: int = 64
    tiles: int = 1
    prompt: int = 316
    answer: int = 256
    questions: int = 1
    long_callers: int = 0
    mix: float = 0.0
    step_time: float = 1.0
    hand_over_ms: float = 1.5
    max_batched_tokens: int = 8192
    seconds: float = 30.0


LETTERS = {
    "long_callers": "l",
    "tiles": "t",
    "questions": "q",
    "step_time": "s",
    "hand_over_ms": "h",
    "max_batched_tokens": "b",
}
"""How a figure's name says what is not the default."""


@dataclass(eq=False)
class Question:
    """One request: which ``number`` it has among its picture's, when it was ``asked`` and left the vision stage;
    ``again``: whether its answer is followed by another question."""

    ids: np.ndarray
    kind: Kind
    number: int
    asked: float
    again: bool
    seen: float = 0.0


class Simulation:
    """The scheduler itself, in a time that passes from event to event."""

    def __init__(self, options: Options, rules: Rules = EVERY_RULE, seed: int = 1) -> None:
        self.now = 0.0  # ms
        self.first_tokens: list[float] = []
        self.spent: dict[str, list[float]] = {}  # by kind, ms from asking to the answer's end
        self.queued: list[float] = []  # from vision to the step that reads the prompt
        self.tokens = self.steps = 0
        self.idle = 0.0  # ms of the GPU
        self._options = options
        self._scheduler = Scheduler(BlockManager(400_000, 16), Load(options.max_batched_tokens, 256, rules))
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []  # a heap
        self._numbers = itertools.count()
        self._vision: deque[Question] = deque()  # those that wait there for a forward
        self._forward_ends, self._owed, self._handed_over = 0.0, 0.0, 0.0
        self._asked: dict[Sequence, Question] = {}
        if options.mix:
            for at, workload in open_loop.arrivals(options.mix, options.seconds, seed):
                asked = Kind(1, MIX_PROMPTS[workload.name], workload.tokens, workload.name)
                self._at(1e3 * at, self._ask, asked, None, False)
            return
        for asked in [Kind(options.tiles, options.prompt, options.answer)] * options.concurrency:
            self._ask(asked)
        for _ in range(options.long_callers):
            self._ask(LONG)

    def monotonic_ns(self) -> int:
        """The scheduler's clock."""
        return int(self.now * 1e6)

    def _at(self, when: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act, arguments))

    def _advance(self, to: float) -> None:
        while self._events and self._events[0][0] <= to:
            at, _, act, arguments = heapq.heappop(self._events)
            self.now = max(self.now, at)
            act(*arguments)
        self.now = max(self.now, to)

    def run(self) -> Simulation:
        """Steps, of which one is launched ahead as the engine does it."""
        policies.time = self  # type: ignore[assignment]
        under_way: deque[tuple[ScheduledBatch, float]] = deque()
        free = 0.0
        while self.now < 1e3 * self._options.seconds:
            first = bool(under_way) and self._scheduler.must_finish_before_next(under_way[-1][0])
            batch = ScheduledBatch([]) if first else self._scheduler.schedule()
            if batch.spans:
                self._scheduled(batch)
                took = self._options.step_time * step_ms(batch.tokens)
                self._scheduler.record_step_time(batch, int(took * 1e6))
                begins = max(free, self.now + 0.3)
                self.idle += begins - free - self._see(begins - free)
                free = begins + took + self._see(took)
                under_way.append((batch, free))
            if len(under_way) > bool(batch.spans):
                self._apply(*under_way.popleft())
            elif not under_way:
                self._advance(self.now + 0.5)
        return self

    def _scheduled(self, batch: ScheduledBatch) -> None:
        if self.now < SKIPPED_MS:
            self.idle = 0.0
            return
        self.steps += 1
        for sequence in (span.sequence for span in batch.spans):
            if not sequence.scheduled_ns:
                sequence.scheduled_ns = self.monotonic_ns()
                self.queued.append(self.now - self._asked[sequence].seen)

    def _see(self, most: float) -> float:
        """What forwards take of the GPU's time in so long."""
        vision = min(self._owed, most)
        self._owed -= vision
        return vision

    def _apply(self, batch: ScheduledBatch, ended: float) -> None:
        self._advance(ended)
        for sequence, _ in self._scheduler.apply(batch, [(1, None)] * len(batch.sampling)):
            counts = self.now > SKIPPED_MS
            self.tokens += counts
            if len(sequence.outputs) == 1 and counts:
                self.first_tokens.append(self.now - self._asked[sequence].asked)
            if sequence.finished:
                question = self._asked.pop(sequence)
                if counts:
                    self.spent.setdefault(question.kind.name, []).append(self.now - question.asked)
                if question.again:
                    self._ask(question.kind, question)

    def _ask(self, kind: Kind, before: Question | None = None, again: bool = True) -> None:
        ids, number = np.array([self._random.randrange(1 << 30) for _ in range(kind.prompt)], np.int32), 0
        if before and before.number + 1 < self._options.questions:
            ids[:-OWN_TOKENS], number = before.ids[:-OWN_TOKENS], before.number + 1
        question = Question(ids, kind, number, self.now, again)
        self._at(self.now + PREPROCESS_MS * self._random.uniform(0.7, 1.5), self._arrive, question)

    def _arrive(self, question: Question) -> None:
        if question.number:  # its rows are copied behind the forward under way
            self._hand_over(question, max(self.now, self._forward_ends))
        else:
            self._vision.append(question)
            self._forward()

    def _forward(self) -> None:
        if self.now < self._forward_ends or not self._vision:
            return
        group, tiles = [self._vision.popleft()], 0
        while (tiles := sum(question.kind.tiles for question in group)) < FORWARD_TILES and self._vision:
            if tiles + self._vision[0].kind.tiles > FORWARD_TILES:
                break
            group.append(self._vision.popleft())
        work = self._options.step_time * TILE_MS * tiles
        self._owed += work
        self._forward_ends = self.now + 1 + 1.6 * work  # beside steps
        for question in group:
            self._hand_over(question, self._forward_ends)
        self._at(self._forward_ends, self._forward)

    def _hand_over(self, question: Question, seen: float) -> None:
        question.seen = seen
        self._handed_over = max(self._handed_over, seen) + self._options.hand_over_ms
        self._at(self._handed_over, self._submit, question)

    def _submit(self, question: Question) -> None:
        """Hands a request over; where pictures have one question each, nothing of it may be found in the cache."""
        sampling = SamplingParameters(max_tokens=question.kind.answer, ignore_eos=True)
        spans, digest = np.array([[PICTURE_START, 0]], np.int32), np.zeros(2, np.int64)
        request = Request("", question.ids, spans, None, digest, sampling, arrival_ns=self.monotonic_ns())
        sequence = Sequence(request, cache_limit=None if self._options.questions > 1 else 0)
        self._asked[sequence] = question
        self._scheduler.add(sequence)


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=Options.__doc__, formatter_class=layout)
    for field in fields(Options):
        kind: Any = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    rules = [field.name for field in fields(Rules)]
    parser.add_argument("--without", nargs="+", default=[], choices=rules, help="rules that are turned off")
    given = vars(parser.parse_args())
    without = given.pop("without")
    options = Options(**given)
    if options.seconds <= SKIPPED_MS / 1e3:
        parser.error(f"the first {SKIPPED_MS / 1e3:g} s do not count; give more --seconds")
    seed = 15 if options.mix else 1  # as the load's schedule
    simulation = Simulation(options, Rules(**dict.fromkeys(without, False)), seed).run()
    counted = options.seconds - SKIPPED_MS / 1e3

    def percentile(values: list[float], share: float) -> int:
        return round(counting.percentile(sorted(values), share))

    name = f"mix.r{options.mix:g}" if options.mix else f"{options.prompt}to{options.answer}.c{options.concurrency}"
    name += "".join(
        f".{letter}{given[what]:g}" for what, letter in LETTERS.items() if given[what] != getattr(Options, what)
    )
    figures.emit(
        f"simulated.{name}{''.join(f'.no_{rule}' for rule in without)}.tok_s",
        round(simulation.tokens / counted),
        "tok/s",
        req_s=round(sum(map(len, simulation.spent.values())) / counted, 1),
        ttft_p50_ms=percentile(simulation.first_tokens, 0.5),
        queued_p50_ms=percentile(simulation.queued, 0.5),
        steps_s=round(simulation.steps / counted, 1),
        idle=round(simulation.idle / counted / 1e3, 3),
        kinds={
            kind: {
                "req_s": round(len(spent) / counted, 1),
                "p50_ms": percentile(spent, 0.5),
                "p99_ms": percentile(spent, 0.99),
            }
            for kind, spent in sorted(simulation.spent.items())
        },
    )
    return 0
