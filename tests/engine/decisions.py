"""What the scheduler decides in 200,000 simulated steps of fixed traffic, as digests: equal as long as no rule changes.

    python tests/engine/decisions.py              # all steps against decisions.json, three minutes on one core
    python tests/engine/decisions.py --quick      # the first thousand of each mix alone
    python tests/engine/decisions.py --write      # takes today's decisions as the baseline
    python tests/engine/decisions.py --print [--quick]

The clock is simulated and a step costs what its tokens do: no torch, no time, whole numbers at random, nothing that
differs between machines. A digest covers each step's spans in their order, which step is awaited before the next is
planned, the queue in its order, who stands outside it, and preemptions.
"""

import argparse
import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tessera.engine.scheduling.block_manager import BlockManager
from tessera.engine.scheduling.policies import Load, Rules
from tessera.engine.scheduling.scheduler import ScheduledBatch, Scheduler
from tessera.engine.sequence import NOT_FINITE, Report, Request, Sequence
from tessera.engine.structured_output.labels import LabelScorer
from tessera.engine.structured_output.sequences import LabelSequence
from tessera.prompt.sampling import SamplingParameters

STORED = Path(__file__).with_suffix(".json")
STEPS, QUICK_STEPS, SEEDS = 10_000, 1_000, (1, 2)
MS = 1_000_000
EOS, TOKEN, LABELS = 9, 5, ("yes", "no", "not sure", "nobody")
Range = tuple[int, int]


@dataclass(frozen=True)
class User:
    """Asks again ``think_ms`` after each answer, ``questions`` about each prompt's beginning; ``slow``: constrained."""

    prompt: Range = (300, 340)
    answer: Range = (1, 9)
    think_ms: Range = (0, 20)
    questions: int = 1
    priority: int = 0
    patience_ms: Range | None = None
    kind: str = "plain"
    not_finite: int = 0  # of 1,000 tokens


@dataclass(frozen=True)
class Mix:
    """Who asks, and what a step costs: by default as InternVL3-8B's on one H200."""

    users: tuple[tuple[int, User], ...]
    blocks: int = 60_000
    max_batched_tokens: int = 8192
    max_sequences: int = 64
    gathers: bool = True
    overlaps: bool = True
    step_us: int = 4_100
    token_us: int = 20


JOB = User(answer=(4, 5), priority=10)
MIXES = {
    "short_answers": Mix(((96, User()),)),
    "long_answers": Mix(((48, User(answer=(60, 400))),)),
    "mixed": Mix(((60, User()), (3, User(prompt=(2000, 7000), answer=(150, 500), think_ms=(0, 300))))),
    "follow_ups": Mix(((32, User(questions=4)), (8, User(prompt=(900, 2400), questions=6, answer=(1, 40))))),
    "job_beside_questions": Mix(
        ((72, JOB), (4, User(answer=(2, 60), think_ms=(100, 1500))), (1, User(think_ms=(20_000, 50_000), priority=-1)))
    ),
    "long_job_beside_questions": Mix(
        (
            (24, User(answer=(50, 300), priority=10)),
            (3, User(prompt=(4000, 12_000), answer=(4, 40), priority=11)),
            (5, User(think_ms=(50, 900))),
        ),
        max_sequences=24,
    ),
    "cancels": Mix(
        (
            (40, User(answer=(1, 120), patience_ms=(1, 2500), questions=2)),
            (8, User(not_finite=30, questions=3)),
            (8, User(priority=3, patience_ms=(1, 900))),
        )
    ),
    "few_blocks": Mix(
        ((20, User(prompt=(20, 300), answer=(5, 200), questions=2)), (6, User(prompt=(20, 600), priority=5))),
        blocks=110,
        max_batched_tokens=512,
        max_sequences=16,
        token_us=150,
    ),
    "constrained": Mix(
        (
            (12, User(kind="constrained", answer=(5, 60))),
            (12, User(kind="labels", questions=2)),
            (6, User(kind="slow", answer=(5, 40))),
            (6, User(answer=(20, 200))),
        ),
        blocks=700,
        max_sequences=24,
    ),
    "one_after_the_other": Mix(
        ((12, User(prompt=(5, 900), answer=(1, 60))), (3, User(questions=3, priority=2))),
        max_batched_tokens=256,
        max_sequences=8,
        gathers=False,
        overlaps=False,
        token_us=400,
    ),
}


class Constrained(Sequence):
    """Runs on once its last token is known; a slow one some time later, and some of these stand outside until then."""

    slow = False

    def __init__(self, now: Callable[[], int], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._now, self._ready_ns = now, 0

    @property
    def _ready(self) -> bool:
        return self._now() >= self._ready_ns

    @property
    def pending(self) -> int:
        return super().pending if self._ready and not self.in_flight else 0

    @property
    def parked(self) -> bool:
        return not self._ready and int(self.request.request_id) % 3 == 0

    def _accept(self, token: int, report: Report | None) -> bool:
        if self.slow:
            self._ready_ns = self._now() + 30 * MS
        return super()._accept(token, report)


class Slow(Constrained):
    slow = True


class Simulation:
    """The engine's loop around a real scheduler, until the steps are over."""

    def __init__(self, mix: Mix, seed: int) -> None:
        self._mix, self._random, self.now = mix, random.Random(seed), 0
        self._scheduler = Scheduler(
            BlockManager(mix.blocks, 16), Load(mix.max_batched_tokens, mix.max_sequences, Rules(bursts=mix.gathers))
        )
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers, self._prompts, self._orders = itertools.count(), itertools.count(1), itertools.count()
        self._asking: dict[Sequence, tuple[User, int, int, int]] = {}
        self._under_way: deque[tuple[ScheduledBatch, int, int]] = deque()
        self._free, self._digest = 0, blake2b(digest_size=8)
        for count, user in mix.users:
            for _ in range(count):
                self._at(self._between(user.think_ms), self._ask, user, 0, 0, 0)

    def digests(self) -> Iterator[str]:
        """After each step, of all so far."""
        with mock.patch("time.monotonic_ns", lambda: self.now):
            while True:
                self._step()
                yield self._digest.hexdigest()

    def _step(self) -> None:
        self._pass(self.now)
        must_finish_before_next = bool(self._under_way) and self._scheduler.must_finish_before_next(
            self._under_way[-1][0]
        )
        if must_finish_before_next:
            self._apply_until(0)
        batch = self._scheduler.schedule()
        if batch.spans:
            self.now += 300_000
            for span in batch.spans:
                span.sequence.scheduled_ns = span.sequence.scheduled_ns or self.now
            took = 1_000 * (self._mix.step_us + self._mix.token_us * batch.tokens)
            self._free = max(self._free, self.now) + took
            self._under_way.append((batch, took, self._free))
        elif not self._under_way:
            self._pass(self.now + MS // 2 if self._scheduler.has_work else self._events[0][0])
        self._note(batch, must_finish_before_next)
        self._apply_until(int(bool(batch.spans) and self._mix.overlaps))

    def _note(self, batch: ScheduledBatch, must_finish_before_next: bool) -> None:
        spans = [(span.sequence.request.request_id, span.start, span.end, bool(span.samples)) for span in batch.spans]
        queues = [
            [each.request.request_id for each in queue]
            for queue in (self._scheduler.waiting, self._scheduler.running, self._scheduler.parked)
        ]
        self._digest.update(
            repr((spans, queues, must_finish_before_next, self._scheduler.preemptions, self.now)).encode()
        )

    def _apply_until(self, under_way: int) -> None:
        while len(self._under_way) > under_way:
            batch, took, ended = self._under_way.popleft()
            self._pass(ended)
            self._scheduler.record_step_time(batch, took)
            for sequence, _ in self._scheduler.apply(batch, [self._sampled(each) for each in batch.sampling]):
                if sequence.finished:
                    self._again(sequence)

    def _sampled(self, sequence: Sequence) -> tuple[int, Report | None]:
        user, _, _, length = self._asking.get(sequence, (User(), 0, 0, 0))  # of one cancelled it does not matter
        if user.not_finite and self._random.randrange(1000) < user.not_finite:
            return NOT_FINITE, None
        children = tuple((child, -1 - (child * 7919 + len(sequence.outputs)) % 97) for child in sequence.children)
        return EOS if len(sequence.outputs) + 1 >= length else TOKEN, Report(0.0, children)

    def _again(self, sequence: Sequence) -> None:
        user, number, prompt, _ = self._asking.pop(sequence)
        more = number + 1 < user.questions
        self._at(
            self.now + self._between(user.think_ms),
            self._ask,
            user,
            number + 1 if more else 0,
            prompt if more else 0,
            sequence.prompt_length,
        )

    def _ask(self, user: User, number: int, prompt: int, length: int) -> None:
        """Question ``number`` about ``prompt`` (0: a new one), whose end is the question's own."""
        if not prompt:
            prompt, length = next(self._prompts), self._random.randrange(*user.prompt)
        ids = np.arange(length, dtype=np.int32) + prompt * 7000
        ids[-21:] += number * 100_000_000
        answer = self._random.randrange(*user.answer)
        sampling = SamplingParameters(
            # Some answers are at their longest, others end before by a token of their own.
            max_tokens=answer if answer % 2 else answer + 50,
            priority=user.priority,
            seed=0,
        )
        none = np.zeros((0, 2), np.int32), None, np.zeros(0, np.int64)
        request = Request(str(next(self._numbers)), ids, *none, sampling, arrival_ns=self.now)
        options = {"stop_ids": (EOS,), "cache_limit": None if user.questions > 1 else 0}
        if user.kind == "labels":
            scorer = LabelScorer(LABELS, lambda text: [ord(each) for each in text], (EOS,))
            sequence: Sequence = LabelSequence(request, scorer, **options)
        elif user.kind != "plain":
            kind = Slow if user.kind == "slow" else Constrained
            sequence = kind(lambda: self.now, request, **options)
        else:
            sequence = Sequence(request, **options)
        self._asking[sequence] = (user, number, prompt, answer)
        self._scheduler.add(sequence)
        if user.patience_ms:
            self._at(self.now + self._between(user.patience_ms), self._leave, sequence)

    def _leave(self, sequence: Sequence) -> None:
        if not sequence.finished:
            self._scheduler.cancel(sequence, "cancelled")
            self._again(sequence)

    def _between(self, milliseconds: Range) -> int:
        return self._random.randrange(milliseconds[0] * MS, milliseconds[1] * MS)

    def _at(self, when: int, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._orders), act, arguments))

    def _pass(self, until: int) -> None:
        while self._events and self._events[0][0] <= until:
            when, _, act, arguments = heapq.heappop(self._events)
            self.now = max(self.now, when)
            act(*arguments)
        self.now = max(self.now, until)


def decided(quick: bool) -> dict[str, str]:
    """By mix, seed and steps, the digest; ``quick``: of each mix's first seed the first steps."""
    found = {}
    for name, mix in MIXES.items():
        for seed in SEEDS[:1] if quick else SEEDS:
            marks = [QUICK_STEPS] if quick else [QUICK_STEPS, STEPS] if seed == SEEDS[0] else [STEPS]
            for step, digest in enumerate(itertools.islice(Simulation(mix, seed).digests(), marks[-1]), 1):
                if step in marks:
                    found[f"{name} seed {seed}, {step} steps"] = digest
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true")
    what.add_argument("--print", action="store_true")
    what.add_argument("--compare", action="store_true", help="which is the default")
    options = parser.parse_args()
    found = decided(options.quick and not options.write)
    text = json.dumps(found, indent=1) + "\n"
    if options.write:
        STORED.write_text(text)
        return 0
    if options.print:
        print(text, end="")
        return 0
    stored = json.loads(STORED.read_text())
    differ = [name for name, digest in found.items() if stored.get(name) != digest]
    print(
        "".join(f"other decisions: {name}\n" for name in differ) + f"{len(found) - len(differ)} of {len(found)} equal"
    )
    return int(bool(differ))


if __name__ == "__main__":
    raise SystemExit(main())
