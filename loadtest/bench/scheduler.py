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
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import counting
import figures
import numpy as np
import open_loop

from bench.engine import PICTURE_START
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
HAND_OVER_MS = 1.5  # from vision to the language model, one request at a time
OWN_TOKENS = 21  # at the end of a prompt, of which a picture's next question has others
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

    def __init__(self, seed: int, rules: Rules, max_batched_tokens: int) -> None:
        self.now = 0.0  # ms
        self.first_tokens: list[float] = []
        self._scheduler = Scheduler(BlockManager(400_000, 16), Load(max_batched_tokens, 256, rules))
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def monotonic_ns(self) -> int:
        """The scheduler's clock."""
        return int(self.now * 1e6)

    def run(self, until: float) -> None:
        raise NotImplementedError

    def _at(self, when: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act, arguments))

    def _advance(self, to: float) -> None:
        while self._events and self._events[0][0] <= to:
            at, _, act, arguments = heapq.heappop(self._events)
            self.now = max(self.now, at)
            act(*arguments)
        self.now = max(self.now, to)

    def _random_ids(self, count: int) -> np.ndarray:
        return np.array([self._random.randrange(1 << 30) for _ in range(count)], np.int32)

    def _sequence(self, ids: np.ndarray, answer: int, cache_limit: int | None = 0, priority: int = 0) -> Sequence:
        """A request that arrives now, all of whose prompt is to be computed."""
        sampling = SamplingParameters(max_tokens=answer, ignore_eos=True, priority=priority)
        spans, digest = np.array([[PICTURE_START, 0]], np.int32), np.zeros(2, np.int64)
        request = Request("", ids, spans, None, digest, sampling)
        return Sequence(replace(request, arrival_ns=self.monotonic_ns()), cache_limit=cache_limit)


def simulate(simulation: Simulation, seconds: float) -> Any:
    """The simulation, when it has run for so long by its own clock."""
    policies.time = simulation  # type: ignore[assignment]
    simulation.run(1e3 * seconds)
    return simulation


class ClosedLoop(Simulation):
    """``concurrency`` requests of a ``kind``, this many ``questions`` about each picture, and beside them
    ``long_callers`` that ask LONG ones; ``mix``: requests a second of open_loop's, for ``seconds``. ``step_time``:
    times that in bf16."""

    def __init__(
        self,
        concurrency: int,
        kind: Kind,
        seed: int,
        questions: int = 1,
        step_time: float = 1.0,
        hand_over_ms: float = HAND_OVER_MS,
        rules: Rules = EVERY_RULE,
        max_batched_tokens: int = 8192,
        long_callers: int = 0,
        mix: float = 0.0,
        seconds: float = 0.0,
    ) -> None:
        super().__init__(seed, rules, max_batched_tokens)
        self.spent: dict[str, list[float]] = {}  # by kind, ms from asking to the answer's end
        self.queued: list[float] = []  # from vision to the step that reads the prompt
        self.tokens = self.steps = 0
        self.idle = 0.0  # ms of the GPU
        self._questions, self._step_time, self._hand_over_ms = questions, step_time, hand_over_ms
        self._vision: deque[Question] = deque()  # those that wait there for a forward
        self._forward_ends, self._owed, self._handed_over = 0.0, 0.0, 0.0
        self._asked: dict[Sequence, Question] = {}
        for asked in [kind] * concurrency + [LONG] * long_callers:
            self._ask(asked)
        for at, workload in open_loop.arrivals(mix, seconds, seed) if mix else ():
            asked = Kind(1, MIX_PROMPTS[workload.name], workload.tokens, workload.name)
            self._at(1e3 * at, self._ask, asked, None, False)

    def run(self, until: float) -> None:
        """Steps, of which one is launched ahead as the engine does it."""
        under_way: deque[tuple[ScheduledBatch, float]] = deque()
        free = 0.0
        while self.now < until:
            first = bool(under_way) and self._scheduler.must_finish_before_next(under_way[-1][0])
            batch = ScheduledBatch([]) if first else self._scheduler.schedule()
            if batch.spans:
                self._scheduled(batch)
                took = self._step_time * step_ms(batch.tokens)
                self._scheduler.record_step_time(batch, int(took * 1e6))
                begins = max(free, self.now + 0.3)
                self.idle += begins - free - self._see(begins - free)
                free = begins + took + self._see(took)
                under_way.append((batch, free))
            if len(under_way) > bool(batch.spans):
                self._apply(*under_way.popleft())
            elif not under_way:
                self._advance(self.now + 0.5)

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
        for sequence, _, _ in self._scheduler.apply(batch, [(1, None)] * len(batch.sampling)):
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
        ids, number = self._random_ids(kind.prompt), 0
        if before and before.number + 1 < self._questions:
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
        work = self._step_time * TILE_MS * tiles
        self._owed += work
        self._forward_ends = self.now + 1 + 1.6 * work  # beside steps
        for question in group:
            self._hand_over(question, self._forward_ends)
        self._at(self._forward_ends, self._forward)

    def _hand_over(self, question: Question, seen: float) -> None:
        question.seen = seen
        self._handed_over = max(self._handed_over, seen) + self._hand_over_ms
        self._at(self._handed_over, self._submit, question)

    def _submit(self, question: Question) -> None:
        sequence = self._sequence(question.ids, question.kind.answer, None if self._questions > 1 else 0)
        self._asked[sequence] = question
        self._scheduler.add(sequence)


def parsed(parser: argparse.ArgumentParser, seconds: float) -> tuple[argparse.Namespace, Rules, str]:
    """The options of both programs and the parser's own; the rules; and what a figure's name adds for these where they
    or the step's size are not the default."""
    rules = [field.name for field in fields(Rules)]
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--without", nargs="+", default=[], choices=rules, help="rules that are turned off")
    parser.add_argument("--max-batched-tokens", type=int, default=8192)
    options = parser.parse_args()
    if options.seconds <= SKIPPED_MS / 1e3:
        parser.error(f"the first {SKIPPED_MS / 1e3:g} s do not count; give more --seconds")
    size = f".b{options.max_batched_tokens}" * (options.max_batched_tokens != 8192)
    name = size + "".join(f".no_{rule}" for rule in options.without)
    return options, Rules(**dict.fromkeys(options.without, False)), name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tiles", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=316, help="tokens")
    parser.add_argument("--answer", type=int, default=256, help="tokens")
    parser.add_argument("--questions", type=int, default=1, help="about each picture, one after the other")
    parser.add_argument("--step-time", type=float, default=1.0, help="times that in bf16; in FP8 it is about 0.6")
    parser.add_argument("--hand-over-ms", type=float, default=HAND_OVER_MS, help="from vision to the language model")
    parser.add_argument("--long-callers", type=int, default=0, help=f"beside the others, of {LONG}")
    parser.add_argument("--mix", type=float, default=0.0, help="requests a second of an open loop, 98 %% short, alone")
    options, rules, of_rules = parsed(parser, 30.0)
    simulation = ClosedLoop(
        0 if options.mix else options.concurrency,
        Kind(options.tiles, options.prompt, options.answer),
        15 if options.mix else 1,  # as the load's schedule
        options.questions,
        options.step_time,
        options.hand_over_ms,
        rules,
        options.max_batched_tokens,
        options.long_callers,
        options.mix,
        options.seconds,
    )
    simulate(simulation, options.seconds)
    counted = options.seconds - SKIPPED_MS / 1e3
    first, queued = (
        round(counting.percentile(sorted(each), 0.5)) for each in (simulation.first_tokens, simulation.queued)
    )
    name = f"simulated.{options.prompt}to{options.answer}.c{options.concurrency}"
    if options.mix:
        name = f"simulated.mix.r{options.mix:g}"
    letters = {"l": "long_callers", "t": "tiles", "q": "questions", "s": "step_time", "h": "hand_over_ms"}
    for letter, what in letters.items():
        if (given := getattr(options, what)) != parser.get_default(what):
            name += f".{letter}{given:g}"
    figures.emit(
        f"{name}{of_rules}.tok_s",
        round(simulation.tokens / counted),
        "tok/s",
        req_s=round(sum(map(len, simulation.spent.values())) / counted, 1),
        ttft_p50_ms=first,
        queued_p50_ms=queued,
        steps_s=round(simulation.steps / counted, 1),
        idle=round(simulation.idle / counted / 1e3, 3),
        kinds={
            kind: {
                "req_s": round(len(spent) / counted, 1),
                "p50_ms": round(counting.percentile(sorted(spent), 0.5)),
                "p99_ms": round(counting.percentile(sorted(spent), 0.99)),
            }
            for kind, spent in sorted(simulation.spent.items())
        },
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
