"""Requests as bars, one above the other in the order of their starts: where each spent its time (an SVG picture), and
which stages the slowest spent it in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from closed_loop import Answered

from tessera_evaluation.charts import Chart

SHOWN = 250
AROUND = "around"
"""What the server does not time: transport, waiting for a preprocess instance, sending the answer. Drawn first, as
nobody knows how much of it comes last."""
COLOURS = {
    AROUND: "#d9d9d9",
    "preprocess": "#4e79a7",
    "vision_queue": "#ffd8a8",
    "vision": "#f28e2b",
    "queue": "#d8c7e8",
    "first_token": "#8a5ea8",
    "decode": "#59a14f",
}
"""Pale where a request waits."""
WIDTH, LEFT, TOP, BAR = 1000, 60, 60, 2.8  # pixels
SLOWEST = 0.02


def spent(answer: Answered) -> dict[str, float]:
    """A request's time in milliseconds, by the names of COLOURS; together what the client waited."""
    whole, stages = 1e3 * answer.seconds, answer.stages
    return dict(zip(COLOURS, (max(0.0, whole - sum(stages)), *stages)))


def delays(answers: Sequence[Answered]) -> dict[str, float]:
    """How many milliseconds more the slowest fiftieth spent in each stage, on average, than the median request."""
    slowest = sorted(answers, key=lambda answer: answer.seconds)[-max(1, round(SLOWEST * len(answers))) :]
    usual, slow = ([spent(answer) for answer in some] for some in (answers, slowest))
    return {name: fmean(one[name] for one in slow) - median(one[name] for one in usual) for name in usual[0]}


def middle(answers: Sequence[Answered], count: int = SHOWN) -> list[Answered]:
    """This many from the middle of a run, in the order of their starts; all where there are no more."""
    by_start = sorted(answers, key=began)
    left_out = max(0, len(by_start) - count) // 2
    return by_start[left_out : left_out + count]


def began(answer: Answered) -> float:
    """When a request was sent (time.perf_counter())."""
    return answer.ended - answer.seconds


def picture(answers: Sequence[Answered], title: str) -> str:
    """The SVG of these requests, which are at least one."""
    shown = middle(answers)
    first, last = began(shown[0]), max(answer.ended for answer in shown)
    bottom = TOP + BAR * len(shown)
    chart = Chart((WIDTH, round(bottom + 40)), (LEFT, WIDTH - 20, TOP, round(bottom)), (first, last), (0.0, 1.0))
    paths: dict[str, list[str]] = {name: [] for name in COLOURS}
    for number, answer in enumerate(shown):
        at = began(answer)
        for name, ms in spent(answer).items():
            x, at = chart.x(at), at + ms / 1e3
            if width := round(chart.x(at) - x, 1):
                paths[name].append(f"M{x:.4g} {number}h{width:g}")
    chart.text(20, 22, title, size="14")
    for place, (name, colour) in enumerate(COLOURS.items()):
        chart.text(20 + 130 * place, 43, f"■ {name.replace('_', ' ')}", fill=colour)
    for second in range(int(last - first) + 1):
        chart.line(chart.x(first + second), TOP, chart.x(first + second), bottom)
        chart.text(chart.x(first + second) - 3, bottom + 18, f"{second} s")
    # A request a unit: half as many digits.
    chart.parts.append(f'<g transform="translate(0 {TOP + BAR / 2:g}) scale(1 {BAR})">')
    for name, bars in paths.items():
        chart.parts.append(f'<path id="{name}" d="{"".join(bars)}" stroke="{COLOURS[name]}"/>')
    chart.parts.append("</g>")
    return chart.svg()


def write(file: Path, answers: Sequence[Answered], title: str) -> str:
    """Writes the picture; what the slowest waited for, in words."""
    file.write_text(picture(answers, title), encoding="utf-8")
    listed = ", ".join(f"{name} {ms:+.0f}" for name, ms in delays(answers).items())
    return f"{file}: the slowest {SLOWEST:.0%} beside the median request, in ms: {listed}"
