"""The held-out set through the running ensemble, at the default tile policy and at one tile (`make bench NAME=recall`).

With `--plan docs/tile_policies.json` every tile policy is asked too; the curve is drawn beside that file. On a GPU:
    python loadtest/bench recall --gpus 0 --instances preprocess=10 --concurrency 64
`--onnx FILE` has the vision stage compute another graph, one written for TensorRT (docs/tensorrt.md), on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import figures
import onnx
from rich.console import Console
from rich.progress import Progress
from serving import Setup, pairs, serve

from tessera.models.internvl.onnx_graph import FINGERPRINT, PRECISION
from tessera.settings.user_cache import write_whole
from tessera.vision.onnx_runner import graph_path
from tessera_client import Client
from tessera_evaluation import plan, recall
from tessera_evaluation.datasets import Item, heldout_items

sys.path.insert(0, str(figures.ROOT / "build"))
from check_export import for_cpu

MAX_TOKENS = 96  # enough for a description
MAX_LOSS = 1.0  # points of recall that a policy may cost
POLICIES = (
    "reference",
    "reference,thumbnail=never",
    "reference,max_tiles=6",
    "reference,max_tiles=1",
    "reference,max_tiles=1,thumbnail=always",
    "native",
    "native,thumbnail=never",
    "budget,token_budget=320",  # five tiles of this model's 64 tokens, as 1280 is for InternVL's 256
    "budget,token_budget=320,thumbnail=never",
    "two-tile",
    "two-tile,thumbnail=always",
)


@contextmanager
def bar(what: str) -> Iterator[Any]:
    """A progress bar on standard error; call the result with (done, total)."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def measure(client: Client, items: list[Item], concurrency: int, **options: Any) -> dict[str, Any]:
    """Asks all questions and returns recall.figures()."""
    with bar("asking") as advance:
        outcomes, seconds = recall.run(
            client,
            items,
            concurrency=concurrency,
            progress=lambda done: advance(done, len(items)),
            max_tokens=MAX_TOKENS,
            **options,
        )
    result = recall.figures(outcomes, seconds)
    recall.print_table(result, Console(stderr=True))
    for error, count in Counter(outcome.error for outcome in outcomes if outcome.error).most_common(3):
        print(f"{count} questions ended in: {error}", file=sys.stderr)
    return result


def write_plan(client: Client, items: list[Item], concurrency: int, file: Path) -> int:
    """Asks all questions under each policy; writes what `tessera plan` would. Returns how many ended in an error."""
    measured = []
    for policy in POLICIES:
        with bar(policy) as advance:
            options = {"concurrency": concurrency, "progress": advance, "max_tokens": MAX_TOKENS}
            measured.append(plan.measure(client, items, policy, secrets.token_hex(8), **options))
    about = {"concurrency": concurrency, "data": "the held-out set", "machine": figures.machine()}
    plan.print_table(measured, MAX_LOSS, Console(stderr=True))
    file.write_text(json.dumps(plan.document(measured, MAX_LOSS, **about), indent=1) + "\n")
    file.with_suffix(".svg").write_text(plan.plot(measured, MAX_LOSS, about), encoding="utf-8")
    return sum(each.errors for each in measured)


def use_graph(cache: Path, file: Path) -> str:
    """Have servers that start from now on find the exported graph in their cache, in place of the CPU stage's own.

    Returns the name of its precision.
    """
    graph = onnx.load(str(file))
    os.environ["TESSERA_CACHE"] = str(cache)
    fingerprint = next(entry.value for entry in graph.metadata_props if entry.key == FINGERPRINT)
    write_whole(graph_path(fingerprint), lambda draft: onnx.save(for_cpu(graph), str(draft)))
    return next(entry.value for entry in graph.metadata_props if entry.key == PRECISION).partition(" ")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="only the first N questions, even over the classes")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--instances", nargs="*", default=[], metavar="STAGE=N")
    parser.add_argument("--set", nargs="*", default=[], metavar="STAGE.PARAMETER=VALUE", dest="parameters")
    parser.add_argument("--gpus", default="", help="numbers with commas between; without any the CPU computes")
    parser.add_argument("--label", help="for other settings than the default's: the figures are recall.LABEL.*")
    parser.add_argument("--plan", type=Path, metavar="FILE.json", help="measure every tile policy and write this")
    parser.add_argument("--pictures", type=Path, help="a folder that keeps the rendered pictures for the next run")
    parser.add_argument("--onnx", type=Path, metavar="FILE", help="a graph of build/export_vision_onnx.py to judge")
    parser.add_argument("--json", type=Path, help="write all figures of both runs here")
    arguments = parser.parse_args()
    setup = Setup(
        gpus=tuple(arguments.gpus.split(",")) if arguments.gpus else (),
        settings=pairs(arguments.parameters, "STAGE.PARAMETER=VALUE"),
        instances={stage: int(count) for stage, count in pairs(arguments.instances, "STAGE=N").items()},
    )
    with tempfile.TemporaryDirectory(prefix="tessera-recall-") as folder:
        graph = use_graph(Path(folder) / "cache", arguments.onnx) if arguments.onnx else None
        with bar("rendering") as advance:
            items = heldout_items(
                arguments.limit, arguments.pictures or Path(folder), root=figures.ROOT, progress=advance
            )
        large = [item for item in items if max(item.width, item.height) >= recall.LARGE]
        with serve(setup) as server, Client(server.grpc) as client:
            client.ask(items[0].picture, "Is there a door?", max_tokens=1)
            default = measure(client, items, arguments.concurrency)
            one_tile = measure(client, large, arguments.concurrency, max_tiles=1)
            failed = write_plan(client, items, arguments.concurrency, arguments.plan) if arguments.plan else 0
    if arguments.json:
        arguments.json.write_text(json.dumps({"default": default, "large_at_one_tile": one_tile}, indent=1))
    label = arguments.label or graph
    notes = {"pictures": len(items), "settings": [*arguments.instances, *arguments.parameters]}
    # A part of the set is a check of one machine against another; only the whole gives the figures that count.
    prefix = ".".join(filter(None, ["recall", label, "sample" if arguments.limit else ""]))
    for name in ("macro", "min_class", "precision"):
        value = round(default[f"recall.{name}"], 4)
        figures.emit(f"{prefix}.{name}", value, "share", ceiling=1, **notes)
    loss = 100 * (macro(default["large"]) - macro(one_tile["large"]))
    figures.emit(f"{prefix}.max_tiles_1_loss", round(loss, 2), "points", large_pictures=len(large))
    figures.emit(f"{prefix}.qpm", default["qpm"], "questions/min", **notes)
    failed += default["errors"] + one_tile["errors"]
    if failed:
        print(f"{failed} questions ended in an error", file=sys.stderr)
    return 1 if failed else 0


def macro(large: dict[str, Any]) -> float:
    """Balanced accuracy of hazard presence over the large pictures."""
    return large["presence"]["balanced_accuracy"]


if __name__ == "__main__":
    raise SystemExit(main())
