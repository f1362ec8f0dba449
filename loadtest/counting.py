"""How a closed loop's answers become figures: one rule for every server and workload.

Answers are taken in the order of their ends. The first 1.5 x concurrency are warm-up and the last 1 x concurrency are
draining; what lies between, five rounds of ``concurrency`` answers, is the steady part. Its rate is that of all its
answers but the first, by the time from its first end to its last. The whole run is all answers by all the time from the
common start. How sure a rate is, is seen in the steady part cut into five windows of equally many answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import stdev

from closed_loop import Answered

ROUNDS = 5
WINDOWS = 5
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for 95 % and 1, 2, ... degrees of freedom."""


def warm_up(concurrency: int) -> int:
    """Answers that are left out at the beginning."""
    return -(-3 * concurrency // 2)


def requests(concurrency: int, least: int = 0) -> int:
    """How many requests a run has: warm-up, five steady rounds or more of ``least`` answers together, draining."""
    return warm_up(concurrency) + (max(ROUNDS, -(-least // concurrency)) + 1) * concurrency


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the sorted values lies."""
    return values[min(len(values) - 1, int(len(values) * share))]


@dataclass(frozen=True)
class Run:
    """A run's figures. Times in seconds, rates by the second."""

    count: int
    """Answers in the steady part."""
    began: float
    ended: float
    """The steady part on time.perf_counter()'s clock."""
    requests_s: float
    windows: tuple[float, ...]
    """Requests a second in each fifth of the steady part."""
    tokens_s: float
    parts_s: float
    p50: float
    p99: float
    first_token_p50: float | None
    first_token_p99: float | None
    whole_requests_s: float
    whole_tokens_s: float
    stages_p50: tuple[float, ...]
    """In milliseconds, of each stage by itself."""

    @property
    def margin(self) -> float:
        """Half the confidence interval (95 %) of a rate, as a share of the rate."""
        return margin(self.windows) / self.requests_s


def student(count: int) -> float:
    """Student's t for 95 % and this many values: degrees of freedom are one fewer."""
    freedom = count - 1
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.5 / freedom


def margin(values: Sequence[float]) -> float:
    """Half the confidence interval (95 %) of the mean of a figure that was taken several times, as in each window."""
    return student(len(values)) * stdev(values) / sqrt(len(values))


def cut(count: int) -> list[int]:
    """Where the windows of this many things begin and end."""
    return [number * count // WINDOWS for number in range(WINDOWS + 1)]


def steady_part(answers: Sequence[Answered], concurrency: int) -> list[Answered]:
    """The answers between warm-up and draining, in the order of their ends."""
    return sorted(answers)[warm_up(concurrency) : len(answers) - concurrency]


def count(began: float, answers: Sequence[Answered], concurrency: int) -> Run:
    """Counts a run that began at this time.

    Raises:
        ValueError: the steady part has fewer than five rounds, or no whole number of them.
    """
    answers, steady = sorted(answers), steady_part(answers, concurrency)
    if len(steady) < ROUNDS * concurrency or len(steady) % concurrency:
        raise ValueError(
            f"{len(answers)} answers leave {len(steady)} in the steady part, which wants whole rounds of "
            f"{concurrency}, at least {ROUNDS}"
        )
    # Of this many whole rounds each, with the time from the last end before them.
    ends = [answer.ended for answer in answers[warm_up(concurrency) - 1 :]]
    windows = [(last - first) / (ends[last] - ends[first]) for first, last in pairwise(cut(len(steady)))]
    seconds, lasted = steady[-1].ended - steady[0].ended, answers[-1].ended - began
    spent = sorted(answer.seconds for answer in steady)
    first = sorted(answer.first_token for answer in steady if answer.first_token is not None)
    return Run(
        count=len(steady),
        began=steady[0].ended,
        ended=steady[-1].ended,
        requests_s=(len(steady) - 1) / seconds,
        windows=tuple(windows),
        tokens_s=sum(answer.tokens for answer in steady[1:]) / seconds,
        parts_s=sum(answer.parts for answer in steady[1:]) / seconds,
        p50=percentile(spent, 0.5),
        p99=percentile(spent, 0.99),
        first_token_p50=percentile(first, 0.5) if first else None,
        first_token_p99=percentile(first, 0.99) if first else None,
        whole_requests_s=len(answers) / lasted,
        whole_tokens_s=sum(answer.tokens for answer in answers) / lasted,
        stages_p50=tuple(percentile(sorted(spent), 0.5) for spent in zip(*(answer.stages for answer in steady))),
    )
