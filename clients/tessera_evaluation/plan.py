"""Which tile policy to deploy: recall and questions a minute of each, measured on the user's own pictures.

A policy is written ``NAME[,KEY=VALUE]...``, as in ``native`` or ``budget,token_budget=512,thumbnail=never``; the server
knows the names. Every policy, and every run, sends the pictures with another mark behind their last byte, where no
decoder looks: none profits from rows that the server kept for an earlier one. Questions about one picture do share
them, as they will in use.

recall is the mean balanced accuracy over the classes of yes/no questions (``recall.macro``), or the share of right
answers where a folder has no such classes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tessera_client.client import Client
from tessera_client.pictures import encode_image
from tessera_evaluation import recall
from tessera_evaluation.charts import Chart, ticks
from tessera_evaluation.datasets import Item
from tessera_wire.errors import InvalidRequest

DEFAULT_POLICIES = (
    "reference",
    "reference,thumbnail=never",
    "native",
    "native,thumbnail=never",
    "budget",
    "budget,thumbnail=never",
    "two-tile",
    "two-tile,thumbnail=always",
    "reference,max_tiles=1",
)

# A share of 3 in n questions gone wrong stays unseen among n of them with a chance of 5%, (1 - 3/n)^n.
UNSEEN = 3


@dataclass(frozen=True, slots=True)
class Measurement:
    """One policy's figures over all questions.

    ``recall`` is a share, of ``scored`` questions; ``qpm`` questions answered a minute of wall time; ``image_tokens``
    the mean of a question; ``p50_ms`` the median answer's time as the client saw it. All 0 where nothing was answered.
    ``error``: the first.
    """

    policy: str
    questions: int
    errors: int
    error: str = ""
    recall: float = 0.0
    scored: int = 0
    qpm: float = 0.0
    image_tokens: float = 0.0
    p50_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class UnseenPicture:
    """A picture file with ``mark`` behind its last byte; read when its turn comes."""

    path: Path
    mark: str

    def read(self) -> bytes:
        return encode_image(self.path) + self.mark.encode()


def parse_policy(text: str) -> dict[str, Any]:
    """``NAME[,KEY=VALUE]...`` as the request's ``tile_policy``; without NAME the keys change the deployment's own.

    Raises ValueError where a part has no key or no value.
    """
    policy: dict[str, Any] = {}
    for index, part in enumerate(text.split(",")):
        key, equals, value = (side.strip() for side in part.partition("="))
        if index == 0 and not equals:
            key, value = "name", key
        if not key or not value:
            raise ValueError(f"{part!r} in {text!r} is not KEY=VALUE; write NAME[,KEY=VALUE]...")
        policy[key] = int(value) if value.isdecimal() else value
    return policy


def measure(
    client: Client,
    items: Sequence[Item],
    policy: str,
    mark: str,
    *,
    concurrency: int = 16,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Measurement:
    """Asks all questions under one policy, after as many unmeasured ones as run at a time.

    Where the server refuses all of those, the others are not asked. ``mark`` must differ between runs.
    """

    def ask(items: Sequence[Item], mark: str, **more: Any) -> tuple[list[recall.Outcome], float]:
        settings = {**options, "tile_policy": parse_policy(policy), "concurrency": concurrency, **more}
        return recall.run(client, items, picture=lambda item: UnseenPicture(item.picture, mark), **settings)

    def ended(done: int) -> None:
        if progress is not None:
            progress(done, len(items))

    warmed, _ = ask(items[:concurrency], f"{mark} {policy} warm-up")
    if all(isinstance(outcome.error, InvalidRequest) for outcome in warmed):
        return Measurement(policy, len(items), len(items), str(warmed[0].error))
    outcomes, seconds = ask(items, f"{mark} {policy}", progress=ended)
    figures = recall.figures(outcomes, seconds)
    classes = [each for each in figures["classes"].values() if each["balanced_accuracy"] is not None]
    tokens = [outcome.usage.image_tokens for outcome in outcomes if outcome.usage]
    return Measurement(
        policy,
        questions=len(items),
        errors=figures["errors"],
        error=next((str(outcome.error) for outcome in outcomes if outcome.error), ""),
        recall=recall.share_right(figures),
        scored=sum(each["yes"] + each["no"] for each in classes) or len(outcomes),
        qpm=figures["qpm"] or 0.0,
        image_tokens=round(sum(tokens) / len(tokens), 1) if tokens else 0.0,
        p50_ms=figures["latency_ms"]["p50"] or 0.0,
    )


def recommend(measured: Sequence[Measurement], max_loss: float) -> Measurement | None:
    """The fastest policy whose recall is at most ``max_loss`` points below the best one's.

    Policies with errors do not count; None if all have some.
    """
    within = [each for each in measured if not each.errors and loss(each, measured) <= max_loss + 1e-9]
    return max(within, key=lambda each: each.qpm, default=None)


def loss(one: Measurement, measured: Sequence[Measurement]) -> float:
    """Points of recall that ``one`` lacks to the best policy without errors."""
    return 100 * (max(each.recall for each in measured if not each.errors) - one.recall)


def document(measured: Sequence[Measurement], max_loss: float, **about: Any) -> dict[str, Any]:
    """The figures as plain data: what ``tessera plan`` prints and reads again."""
    chosen = recommend(measured, max_loss)
    return {
        "recommended": chosen.policy if chosen else None,
        "tile_policy": parse_policy(chosen.policy) if chosen else None,
        "max_loss": max_loss,
        **about,
        "policies": [asdict(each) for each in measured],
    }


def read_document(file: Path) -> tuple[list[Measurement], dict[str, Any]]:
    """The measurements of an earlier run's JSON, and what it says about the run. Raises InvalidRequest."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        measured = [Measurement(**each) for each in found.pop("policies")]
        if not measured:
            raise ValueError("no policies")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{file} does not hold the figures of `tessera plan`: {error!r:.200}") from error
    for computed in ("recommended", "tile_policy", "max_loss"):
        found.pop(computed, None)
    return measured, found


def print_table(measured: Sequence[Measurement], max_loss: float, console: Any) -> None:
    """The measurements and the recommendation on a rich console."""
    from rich.table import Table

    chosen = recommend(measured, max_loss)
    table = Table(title="Tile policies", box=None)
    for name in ("policy", "recall", "loss", "QPM", "tokens", "p50 ms", "errors"):
        figure = name != "policy"  # a long policy may take two lines
        table.add_column(name, no_wrap=figure, justify="right" if figure else "left", overflow="fold")
    for each in measured:
        cells = [f"{100 * each.recall:.2f}%", "-", f"{each.qpm:g}", f"{each.image_tokens:g}", f"{each.p50_ms:g}"]
        if not each.errors:
            cells[1] = f"{loss(each, measured):.2f}"
        table.add_row(each.policy, *cells, str(each.errors), style="bold" if each == chosen else None)
    console.print(table)
    if chosen:
        console.print(
            f"allowed loss of recall, in points: {max_loss:g}; the fastest policy: {chosen.policy}\n"
            f"deploy it: TESSERA_PREPROCESS_TILE_POLICY='{json.dumps(parse_policy(chosen.policy))}'",
            highlight=False,
            soft_wrap=True,
        )
        visible = 100 * UNSEEN / chosen.scored
        if visible > max_loss:
            enough = f"{100 * UNSEEN / max_loss:.0f}" if max_loss else "more"
            console.print(
                f"beware: recall rests on {chosen.scored} questions, which may well miss a loss of up to "
                f"{visible:.2g} points; for {max_loss:g} ask {enough}",
                soft_wrap=True,
            )


WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960, 60, 520, 74, 384  # the axes' box; the legend stands to the right of it
BLUE, RED = "#2c6fbb", "#c0392b"
UNMARKED = ("white", "black", "normal", "")


def plot(measured: Sequence[Measurement], max_loss: float, about: Mapping[str, Any]) -> str:
    """Recall against QPM as an SVG picture: numbered points, a line through the policies that no other beats in both,
    and the least recall allowed. ``about`` as in :func:`document`: data, concurrency, url or machine go into the title.

    Raises InvalidRequest where no policy was measured without errors.
    """
    points = sorted((each for each in measured if not each.errors), key=lambda each: each.qpm, reverse=True)
    chosen = recommend(measured, max_loss)
    if chosen is None:
        raise InvalidRequest("there is nothing to plot: no policy was measured without errors")
    recalls = [100 * each.recall for each in points]
    least = max(recalls) - max_loss
    # Room for one point at least below and above, so that a flat curve looks flat.
    low, high, fastest = min(*recalls, least) - 1, max(recalls) + 1, 1.1 * points[0].qpm

    title = f"Tile policies: {points[0].questions} questions of {about.get('data', 'unknown data')}"
    if "concurrency" in about:
        title += f", {about['concurrency']} at a time"
    height = max(BOTTOM + 60, TOP + 34 * len(points) + 20)
    chart = Chart((WIDTH, height), (LEFT, RIGHT, TOP, BOTTOM), (0, fastest), (low, high))
    chart.text(20, 22, title, size="14")
    chart.text(20, 40, str(about.get("machine") or about.get("url") or "unknown machine"), fill="#555")
    chart.text(20, TOP - 10, "recall, %")
    chart.axes(ticks(0, fastest), ticks(low, min(high, 100)), "questions a minute")
    chart.line(LEFT, chart.y(least), RIGHT, chart.y(least), f'stroke="{RED}" stroke-dasharray="5 4"')
    chart.text(RIGHT, chart.y(least) + 14, f"allowed loss: {max_loss:g}", "end", RED)
    unbeaten = [each for n, each in enumerate(points) if all(recalls[n] > other for other in recalls[:n])]
    chart.curve(((each.qpm, 100 * each.recall) for each in unbeaten), BLUE, 1.5)
    for number, (each, percent) in enumerate(zip(points, recalls, strict=True), 1):
        across, down, row = chart.x(each.qpm), chart.y(percent), TOP + 34 * (number - 1)
        fill, ink, weight, word = (BLUE, "white", "bold", " (recommended)") if each == chosen else UNMARKED
        chart.dot(across, down, fill, BLUE)
        chart.text(across, down + 4, str(number), "middle", ink)
        chart.text(RIGHT + 20, row, f"{number}  {each.policy}{word}", weight=weight)
        figures = f"{percent:.2f}%, {each.qpm:g} QPM, {each.image_tokens:g} image tokens"
        chart.text(RIGHT + 34, row + 14, figures, fill="#555")
    return chart.svg()
