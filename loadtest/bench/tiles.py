"""What a picture's tiles cost: W2's picture of 480x320 in 13 tiles (12 and a thumbnail) down to one, on InternVL3-8B's
shape with random weights (`make bench NAME=tiles`).

13 tiles against 2 is what the report says that this project repeats ("3328 to 512 tokens: twice the throughput"): one
server is asked both in turns until the 95 % interval of the ratio is at most 2 % either way or --seconds are over. The
counts between are asked once each, with the interval by five windows of the run. In flight are about 96 tiles, and
eight requests or more, so that a run takes the same few seconds at any count: on an H200 the whole takes four minutes.

    python loadtest/bench tiles --gpus 0                      the figure `seeds.tiles_13_to_2.ratio` with all points
    python loadtest/bench tiles --report                      docs/tiles.svg and docs/tile_policies.md, as recorded
    python loadtest/bench tiles --gpus "" --checkpoint build/default_model/checkpoint --weights checkpoint \\
        --in-flight 2 --plot trial.svg                        a trial on the CPU

The plot has recall beside it: the points of docs/tile_policies.json, by the mean of tiles a picture.
"""

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import counting
import figures
import report
import turns
from measuring import Taken, take
from serving import add_arguments, serve, setup, setup_notes
from targets import TesseraAsker

from bench.ladder import first_answers
from bench.ladder_report import MISSING, share_interval
from bench.ladder_rungs import SHAPE, Job
from tessera_evaluation.charts import Chart, ticks
from tessera_evaluation.plan import Measurement, read_document

METRIC = "seeds.tiles_13_to_2.ratio"
MOST, LEAST = 13, 2
TILES_IN_FLIGHT = 96
DEFAULT_MODELS_TOKENS = 64
"""A tile, of the model whose recall was measured."""
PAGE = figures.ROOT / "docs" / "tile_policies.md"
PLOT = figures.ROOT / "docs" / "tiles.svg"


def job(tiles: int, in_flight: int | None = None) -> Job:
    """W2's picture in this many tiles."""
    grid = {"name": "reference", "min_tiles": tiles, "max_tiles": tiles, "thumbnail": "never"}
    policy = {"name": "dense"} if tiles == MOST else grid
    return Job("W2", 480, 320, tokens=4, concurrency=in_flight or max(8, TILES_IN_FLIGHT // tiles), tile_policy=policy)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Emits the figure, and returns what the plot needs of it."""
    asked, jobs = setup(options), {tiles: job(tiles, options.in_flight) for tiles in options.counts}
    points = []
    with serve(asked) as server:

        def turn(tiles: int, seed: int) -> Taken:
            # Other pictures for each count: it is one server.
            return take(TesseraAsker(server.grpc, jobs[tiles], seed + tiles), 0, asked.gpus)

        usages = {tiles: first_answers(server.grpc, each) for tiles, each in jobs.items()}
        if len({usage.image_tokens / tiles for tiles, usage in usages.items()}) > 1:
            raise RuntimeError(f"pictures should have as many tiles as is said, and have {usages}")
        compared = turns.Comparison(partial(turn, LEAST), partial(turn, MOST), lambda taken: taken.run.requests_s)
        turns.compare({"2 tiles over 13": compared}, options.seconds)
        of_both = dict(zip((MOST, LEAST), zip(*compared.turns)))
        for tiles, each in jobs.items():
            runs: Sequence[Taken] = of_both.get(tiles) or [turn(tiles, random.randrange(1 << 30))]
            rates = [taken.run.requests_s for taken in runs]
            ci95 = counting.margin(rates) if len(rates) > 1 else rates[0] * runs[0].run.margin
            drawn = [taken.power.watts for taken in runs if taken.power]
            points.append(
                {
                    "tiles": tiles,
                    "image_tokens": usages[tiles].image_tokens,
                    "in_flight": each.concurrency,
                    "req_s": round(fmean(rates), 3),
                    "ci95": round(ci95, 3),
                    **({"joules": round(fmean(drawn) / fmean(rates), 2)} if drawn else {}),
                }
            )
            print(points[-1], file=sys.stderr, flush=True)
    ratio, about = compared.ratio, {"points": points, "turns": len(compared.turns), **setup_notes(options)}
    trial = "" if asked.gpus else "trial."
    figures.emit(trial + METRIC, round(ratio.value, 3), "ratio", ci95=round(ratio.ci95, 3), **about)
    return {"value": ratio.value, "ci95": ratio.ci95, "machine": figures.machine(), **about}


def table(figure: Mapping[str, Any] | None) -> str:
    """Markdown."""
    if figure is None:
        return f"Requests a second by the number of tiles: {MISSING}.\n"
    rows = ["| tiles | image tokens | in flight | req/s | J |", "|---|---|---|---|---|"]
    for point in figure["points"]:
        cells = [str(point[name]) for name in ("tiles", "image_tokens", "in_flight")]
        cells += [f"{point['req_s']:.2f} ± {point['ci95']:.2f}", str(point.get("joules", ""))]
        rows.append(f"| {' | '.join(cells)} |")
    ratio = turns.Ratio(figure["value"], figure["ci95"])
    taken = ", ".join(figure[name] for name in ("machine", "commit", "date"))
    said = f"2 tiles in place of 13, in {figure['turns']} turns: **{ratio}** times the requests a second ({taken})."
    return "\n".join([*rows, "", said, "", f"![requests a second and recall by tiles]({PLOT.name})", ""])


WIDTH, LEFT, RIGHT, TOP, BOTTOM = 980, 60, 560, 74, 384
BLUE, GREEN = "#2c6fbb", "#3a7d44"
WHISKER = 'stroke="{}" stroke-width="1.5"'


def plot(figure: Mapping[str, Any], measured: Sequence[Measurement]) -> str:
    """Requests a second and, on an axis of its own, recall, both by tiles a picture with their 95 % intervals."""
    box, most = (LEFT, RIGHT, TOP, BOTTOM), max(point["req_s"] + point["ci95"] for point in figure["points"])
    size = (WIDTH, max(BOTTOM + 60, TOP + 18 * len(measured) + 20))
    rates = Chart(size, box, (0, MOST + 1), (0, 1.1 * most))
    found = [(each, *share_interval(round(each.recall * each.scored), each.scored)) for each in measured]
    least = 100 * min(low for _, low, _ in found)
    shares = Chart(size, box, (0, MOST + 1), (least - 1, 100.5), rates.parts)
    rates.text(20, 22, "One picture of 480 x 320 in 1 to 13 tiles: requests a second", size="14", fill=BLUE)
    rates.text(20, 42, "The held-out set by tile policy: recall, by the mean of tiles a picture", size="14", fill=GREEN)
    rates.text(WIDTH - 20, 22, figure["machine"], "end", "#555")
    rates.text(20, TOP - 10, "req/s", fill=BLUE)
    rates.text(RIGHT - 20, TOP - 10, "recall, %", fill=GREEN)
    rates.axes(
        {tiles: str(tiles) for tiles in range(1, MOST + 1)},
        ticks(0, 1.1 * most),
        "tiles a picture (256 tokens each; 64 of the model whose recall it is)",
    )
    for percent, label in ticks(least - 1, 100).items():
        rates.text(RIGHT + 8, shares.y(percent) + 4, label, fill=GREEN)
    for point in figure["points"]:
        low, high = point["req_s"] - point["ci95"], point["req_s"] + point["ci95"]
        whisker(rates, point["tiles"], low, high, BLUE)
    rates.curve(((point["tiles"], point["req_s"]) for point in figure["points"]), BLUE, 1.5)
    for number, (each, low, high) in enumerate(found, 1):
        tiles, percent = each.image_tokens / DEFAULT_MODELS_TOKENS, 100 * each.recall
        whisker(shares, tiles, 100 * low, 100 * high, GREEN)
        shares.dot(shares.x(tiles), shares.y(percent), "white", GREEN)
        shares.text(shares.x(tiles), shares.y(percent) + 4, str(number), "middle")
        shares.text(RIGHT + 48, TOP + 18 * (number - 1), f"{number}  {each.policy}: {percent:.2f}%, {tiles:.1f} tiles")
    return rates.svg()


def whisker(chart: Chart, across: float, low: float, high: float, colour: str) -> None:
    """An interval."""
    chart.line(chart.x(across), chart.y(low), chart.x(across), chart.y(high), WHISKER.format(colour))


def update(check: bool = False) -> bool:
    """Writes page and plot as recorded, unless they are only to be checked; whether that changes any."""
    figure = figures.read().get(METRIC)
    drawn = figure and plot(figure, recalls())
    changed = drawn is not None and (not PLOT.exists() or PLOT.read_text() != drawn)
    if drawn is not None and not check:
        PLOT.write_text(drawn)
    return report.write(PAGE, table(figure), check) or changed


def recalls() -> list[Measurement]:
    measured, _ = read_document(figures.ROOT / "docs" / "tile_policies.json")
    return sorted(measured, key=lambda each: each.image_tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    counts = {"nargs": "+", "type": int, "choices": range(1, MOST + 1), "default": range(MOST, 0, -1)}
    parser.add_argument("--counts", **counts, metavar="N", help="of tiles, beside 13 and 2 (default: all)")
    parser.add_argument("--seconds", type=float, default=120.0, help="after which 13 and 2 begin no turn")
    parser.add_argument("--in-flight", type=int, help="requests, in place of as many as have about 96 tiles")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw what was measured")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing: write the recorded figure's page and plot"
    )
    add_arguments(parser)
    parser.set_defaults(checkpoint=SHAPE, weights="random")
    options = parser.parse_args()
    options.counts = sorted({*options.counts, MOST, LEAST}, reverse=True)
    if options.report:
        update()
        return 0
    figure = measure(options)
    if options.plot:
        options.plot.write_text(plot(figure, recalls()))
    return 0
