"""What the rules do to questions beside a batch job, without a GPU: the scheduler itself, with steps and forwards that
share a GPU (`make bench NAME=scheduler_jobs`; on one: `make bench NAME=jobs`).

    python loadtest/bench scheduler_jobs --rate 2

Steps' times are scheduler's. How steps and forwards slow each other, and the time between two steps, are not
measured but fitted: to W1's rate and its stages, and to those of `jobs` with whole forwards on one H200 (2caa7eb: first
token 292 ms, p99 460, loss 2.1 %). They say that beside a long step a forward hardly gets on, so that most end as a
step begins: who waited for one is late for that step, and waits for the whole of it.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import counting
import figures

from bench import scheduler
from bench.scheduler import FORWARD_TILES, SKIPPED_MS, TILE_MS, parsed, simulate, step_ms
from tessera.engine.scheduling.policies import EVERY_RULE, Rules
from tessera.engine.scheduling.scheduler import ScheduledBatch
from tessera.engine.sequence import Sequence
from tessera.prompt.sampling import rank
from tessera.vision.scheduler import MOST

CONCURRENCY, PROMPT, ANSWER, JOB_PRIORITY = 256, 316, 4, 10  # W1
LONG_TOKENS = 600  # a step of more
BESIDE = {True: (0.91, 0.13), False: (0.5, 0.7)}  # long or not: speeds of a step and a forward beside each other
QUESTION_MS = {True: 22.0, False: 7.0}  # a forward of one tile, which goes first: beside a long step or not
GAP_MS, FORWARD_GAP_MS = 11.0, 1.0  # from a plan to its step's first kernel, between two forwards
LAUNCH_MS = {True: 20.0, False: 2.0}  # of the host: a long step, one in a graph
HAND_OVER_MS, ON_ITS_WAY_MS = 2.0, 1.5  # from vision to the language model: one at a time, and until it is there
CLIENT_MS = 8.0  # what a client sees beyond the stages
PREPROCESS_MS = (4.0, 12.0)  # and the way there from the answer before


@dataclass(eq=False)
class Asked:
    """A request on its way."""

    priority: int
    at: float
    rank: int = 0


@dataclass(eq=False)
class Work:
    """A step or a forward: milliseconds alone that are left, not begun before a time, and what it is for."""

    left: float
    begins: float
    of: Any = field(default=None)


class Simulation(scheduler.Simulation):
    """W1 in a closed loop, and this many questions a second beside it."""

    def __init__(self, questions_s: float, seed: int, rules: Rules, max_batched_tokens: int) -> None:
        super().__init__(seed, rules, max_batched_tokens)
        self.answered: list[float] = []  # ms from the job's requests to their answers' ends
        self._rate = questions_s
        self._vision: list[tuple[int, int, Asked]] = []  # a heap
        self._taken: deque[Asked] = deque()  # by the encoder
        self._forward: Work | None = None
        self._beside: Work | None = None  # a question's forward beside that
        self._steps: deque[Work] = deque()
        self._arrived: list[Sequence] = []
        self._asked: dict[Sequence, Asked] = {}
        self._sent = 0.0
        for _ in range(CONCURRENCY):
            self._at(self._random.uniform(0, 1000), self._ask, JOB_PRIORITY)
        if questions_s:
            self._at(0.0, self._question)

    def run(self, until: float) -> None:
        """Steps as engine.py does."""
        while self.now < until:
            if self._steps and self._scheduler.must_finish_before_next(self._steps[-1].of):
                self._apply(0)
            arrived, self._arrived = self._arrived, []
            for sequence in arrived:
                self._scheduler.add(sequence)
            batch = self._scheduler.schedule()
            if batch.spans:
                took = step_ms(batch.tokens)
                self._scheduler.record_step_time(batch, int(took * 1e6))
                self._steps.append(Work(took, self.now + GAP_MS, batch))
                self._pass(self.now + LAUNCH_MS[batch.tokens > LONG_TOKENS])
            elif not self._steps:
                self._pass(self.now + 0.5)
            self._apply(int(bool(batch.spans)))

    def _apply(self, under_way: int) -> None:
        while len(self._steps) > under_way:
            while self._steps[0].left:
                self._pass(self.now + 1000, self._steps[0])
            batch: ScheduledBatch = self._steps.popleft().of
            for sequence, _, _ in self._scheduler.apply(batch, [(1, None)] * len(batch.sampling)):
                asked = self._asked[sequence]
                counts, of_job = asked.at > SKIPPED_MS, asked.priority == JOB_PRIORITY
                if len(sequence.outputs) == 1 and counts and not of_job:
                    self.first_tokens.append(self.now - asked.at + CLIENT_MS)
                if sequence.finished:
                    del self._asked[sequence]
                    if of_job:
                        if self.now > SKIPPED_MS:
                            self.answered.append(self.now - asked.at)
                        self._ask(JOB_PRIORITY)

    def _pass(self, until: float, awaited: Work | None = None) -> None:
        """Lets time pass, no longer than until the awaited step ends."""
        while self.now < until and (awaited is None or awaited.left):
            step = next((each for each in self._steps if each.left), None)
            runs = [step] if step and step.begins <= self.now else []
            long = bool(runs) and runs[0].of.tokens > LONG_TOKENS
            speeds = {each: 1.0 for each in runs}
            if self._forward:
                speeds[self._forward] = 1.0
                if _of_question(self._forward):
                    speeds[self._forward] = QUESTION_MS[False] / QUESTION_MS[long]
                elif runs:
                    speeds[runs[0]], speeds[self._forward] = BESIDE[long]
            if self._beside:
                speeds[self._beside] = QUESTION_MS[False] / QUESTION_MS[long]
            times = [until, *(self.now + work.left / speed for work, speed in speeds.items())]
            if step and not runs:
                times.append(step.begins)
            if self._events:
                times.append(self._events[0][0])
            passed = max(0.0, min(times) - self.now)
            for work, speed in speeds.items():
                work.left = max(0.0, work.left - passed * speed)
                work.left *= work.left > 1e-9
            self.now += passed
            for work in (self._beside, self._forward):
                if work and not work.left:
                    self._hand_over(work)
            self._advance(self.now)

    def _question(self) -> None:
        self._ask(0)
        self._at(self.now + 1e3 * self._random.expovariate(self._rate), self._question)

    def _ask(self, priority: int) -> None:
        way = PREPROCESS_MS[0] if priority < JOB_PRIORITY else self._random.uniform(*PREPROCESS_MS)
        self._at(self.now + way, self._arrive, Asked(priority, self.now))

    def _arrive(self, asked: Asked) -> None:
        asked.rank = rank(asked.priority, self.monotonic_ns())
        heapq.heappush(self._vision, (asked.rank, next(self._numbers), asked))
        self._begin_forward()

    def _begin_forward(self) -> None:
        """As vision/dispatch.py does: a batch of one priority, and beside and between its forwards those that pass."""
        if self._forward and not self._beside and not _of_question(self._forward):
            if self._vision and self._vision[0][2].priority < JOB_PRIORITY:
                asked = [heapq.heappop(self._vision)[2]]
                self._beside = Work(QUESTION_MS[False], self.now, asked)
            return
        if self._forward or self._beside or not (self._taken or self._vision):
            return
        if self._taken and self._vision and self._vision[0][2].priority < self._taken[0].priority:
            asked = self._of_one_priority(FORWARD_TILES)
        else:
            self._taken.extend(() if self._taken else self._of_one_priority(MOST))
            asked = [self._taken.popleft() for _ in range(min(len(self._taken), FORWARD_TILES))]
        self._forward = Work(TILE_MS * len(asked) + 0.7, self.now, asked)
        if _of_question(self._forward):
            self._forward.left = QUESTION_MS[False] * len(asked)

    def _of_one_priority(self, most: int) -> list[Asked]:
        first, taken = self._vision[0][2], []
        while self._vision and len(taken) < most and self._vision[0][2].priority == first.priority:
            taken.append(heapq.heappop(self._vision)[2])
        return taken

    def _hand_over(self, done: Work) -> None:
        if done is self._beside:
            self._beside = None
        else:
            self._forward = None
        for asked in done.of:
            self._sent = max(self._sent, self.now) + HAND_OVER_MS
            self._at(self._sent + ON_ITS_WAY_MS, self._submit, asked)
        self._at(self.now + FORWARD_GAP_MS, self._begin_forward)

    def _submit(self, asked: Asked) -> None:
        sequence = self._sequence(self._random_ids(PROMPT), ANSWER, priority=asked.priority)
        self._asked[sequence] = asked
        self._arrived.append(sequence)


def _of_question(forward: Work) -> bool:
    return forward.of[0].priority < JOB_PRIORITY


def simulated(
    questions_s: float, seconds: float, rules: Rules = EVERY_RULE, max_batched_tokens: int = 8192
) -> Simulation:
    return simulate(Simulation(questions_s, 1, rules, max_batched_tokens), seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=2.0, help="questions a second")
    options, rules, of_rules = parsed(parser, 300.0)
    given = options.seconds, rules, options.max_batched_tokens
    alone, beside = simulated(0.0, *given), simulated(options.rate, *given)
    waited = sorted(beside.first_tokens)
    p50, p99 = (round(counting.percentile(waited, part), 1) for part in (0.5, 0.99))
    median, slowest = (counting.percentile(sorted(alone.answered), part) for part in (0.5, 0.99))
    counted = options.seconds - SKIPPED_MS / 1e3
    rates = {
        "alone_req_s": round(len(alone.answered) / counted, 2),
        "beside_req_s": round(len(beside.answered) / counted, 2),
        "alone_p99_over_p50": round(slowest / median, 3),
    }
    name = "simulated.jobs" + f".r{options.rate:g}" * (options.rate != parser.get_default("rate")) + of_rules
    figures.emit(f"{name}.ttft_p50_ms", p50, "ms", ttft_p99_ms=p99, questions=len(waited))
    loss = 1 - len(beside.answered) / len(alone.answered)
    figures.emit(f"{name}.loss_pct", round(100 * loss, 2), "%", **rates)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
