"""``tessera quantize``: a checkpoint in, a smaller one and a report of what it lost out."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tessera.checkpoint.files import find_checkpoint
from tessera.errors import TesseraError
from tessera_evaluation.datasets import evenly, folder_items
from tessera_evaluation.plan import parse_policy
from tessera_quantize import report
from tessera_quantize.methods import METHODS, Recipe
from tessera_quantize.run import Job, finish, run
from tessera_wire.command_line import Parser
from tessera_wire.errors import InvalidRequest


def quantize_main(argv: Sequence[str]) -> int:
    """Runs the command. Returns 0, 1 for what does not fit, 2 for a folder of pictures that is at fault."""
    options = _parser().parse_args(argv)
    try:
        job = _job(options)
        rows = run(job, _progress)
        report.write(job.work / job.recipe.method / "checkpoint" / "quantization", job, rows)
        finish(job)
    except (TesseraError, InvalidRequest) as error:
        print(f"tessera quantize: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequest) else 1
    print(json.dumps(report.document(job, rows)))
    print(f"written: {job.out}; the report: {job.out / 'quantization' / 'report.md'}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tessera quantize",
        description="Quantize a checkpoint's language model, calibrated on pictures. A run that was killed goes on "
        "where it was when the same command is given again.",
    )
    add = parser.add_argument
    named = "the unquantized checkpoint: its folder, or its name (Org/Name) in the hub's cache"
    add("checkpoint", type=Path, help=named)
    add("out", type=Path, help="the folder to write; must not exist")
    add("--method", required=True, choices=METHODS)
    add("--group-size", type=int, default=128, metavar="N", help="columns that share a scale, of 4 bits (%(default)s)")
    add("--symmetric", action="store_true", help="no zeros: the middle of every grid is 0")
    pictures = "your own pictures: a folder with labels.csv (file,question,answer[,class][,kind])"
    add("--pictures", type=Path, required=True, metavar="FOLDER", help=pictures)
    add("--calibration", type=int, default=128, metavar="N", help="questions to calibrate on (%(default)s)")
    add("--held-out", type=int, default=64, metavar="N", help="other questions, for the report (%(default)s)")
    add("--judge", type=Path, metavar="FOLDER", help="take the held-out questions from this labelled folder instead")
    add("--vision", choices=("as-it-is", "fp8"), default="as-it-is", help="the vision tower's layers (%(default)s)")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cpu", "cuda"), default=default, help="(%(default)s)")
    each = "a tile policy to measure recall with, NAME[,KEY=VALUE]...; may be repeated (the checkpoint's own)"
    add("--policy", action="append", metavar="POLICY", help=each)
    add("--no-comparison", action="store_true", help="leave out the report's rows for RTN and calibration on words")
    return parser


def _job(options: argparse.Namespace) -> Job:
    items = folder_items(options.pictures)
    if options.judge:
        calibration, held_out = evenly(items, options.calibration), folder_items(options.judge, options.held_out)
    else:
        held_out = evenly(items, min(options.held_out, len(items) // 2))
        taken = set(held_out)
        calibration = evenly([item for item in items if item not in taken], options.calibration)
    if min(len(calibration), len(held_out)) < 1:
        raise InvalidRequest(f"{options.pictures} needs at least two questions, to calibrate on and to judge by")
    try:
        policies = tuple((text, parse_policy(text)) for text in options.policy or ()) or Job.policies
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    return Job(
        source=find_checkpoint(options.checkpoint),
        out=options.out,
        recipe=Recipe(options.method, options.group_size, options.symmetric),
        calibration=calibration,
        held_out=held_out,
        device=options.device,
        vision_fp8=options.vision == "fp8",
        compare=not options.no_comparison,
        policies=policies,
    )


@contextmanager
def _progress(what: str, steps: int) -> Iterator[Callable[[], Any]]:
    """A bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=steps)
        yield lambda: bar.advance(task)
