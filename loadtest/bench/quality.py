"""Recall of the default model on the held-out set, through the server (`make bench NAME=recall`, `NAME=quantization`).

recall: all 4,524 questions at the default tile policy, and those about large pictures at one tile (`tessera recall`
and `tessera plan` measure a server that runs). `--onnx FILE` has the vision stage compute another graph, one written
for TensorRT (docs/tensorrt.md), on the CPU.

    python loadtest/bench recall --gpus 0 --instances preprocess=10 --concurrency 64

quantization: the checkpoint as it is, then each quantized variant: `fp8` (the language model, on load), `fp8_vision`,
`fp8_kv` (keys and values in the cache), and checkpoints that `tessera quantize` wrote (`--made`). Each is asked all
questions at its own tile policy, where nearly everything is right, and at one tile a picture, where there is much to
lose; a variant's drop is the larger of the two, in points of balanced accuracy over the hazard classes.

    python loadtest/bench quantization --gpus 0 --instances preprocess=10 --concurrency 64 \\
        --made awq=OUT_AWQ gptq=OUT_GPTQ

Without --gpus the CPU computes.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import figures
import onnx
from rich.console import Console
from serving import Setup, add_arguments, pairs, serve, setup, setup_notes
from tqdm import tqdm

from tessera.models.internvl.onnx_graph import FINGERPRINT, PRECISION
from tessera.settings.user_cache import write_whole
from tessera.vision.onnx_runner import graph_path
from tessera_client import Client
from tessera_command import terminal
from tessera_evaluation import recall
from tessera_evaluation.datasets import Item, heldout_items

sys.path.insert(0, str(figures.ROOT / "build" / "vision"))
from check_graph import for_cpu

MAX_TOKENS = 96  # enough for a description

BOTH: dict[str, dict[str, Any]] = {"reference": {}, "reference,max_tiles=1": {"max_tiles": 1}}
ON_LOAD = {
    "fp8": {"quantization": "fp8-language"},
    "fp8_vision": {"quantization": "fp8-vision"},
    "fp8_kv": {"language_model.kv_cache_dtype": "fp8"},
}


def measure(client: Client, items: list[Item], concurrency: int, **options: Any) -> dict[str, Any]:
    """Asks all questions and returns recall.figures()."""
    with tqdm(total=len(items), desc="asking") as bar:
        outcomes, seconds = recall.run(
            client,
            items,
            concurrency=concurrency,
            progress=lambda done: bar.update(done - bar.n),
            max_tokens=MAX_TOKENS,
            **options,
        )
    result = recall.figures(outcomes, seconds)
    recall.print_table(result, Console(stderr=True))
    for error, count in Counter(outcome.error for outcome in outcomes if outcome.error).most_common(3):
        print(f"{count} questions ended in: {error}", file=sys.stderr)
    return result


def use_graph(cache: Path, file: Path) -> str:
    """Have servers that start from now on find the exported graph in their cache, in place of the CPU stage's own.

    Returns the name of its precision.
    """
    graph = onnx.load(str(file))
    os.environ["TESSERA_CACHE"] = str(cache)
    fingerprint = next(entry.value for entry in graph.metadata_props if entry.key == FINGERPRINT)
    write_whole(graph_path(fingerprint), lambda draft: onnx.save(for_cpu(graph), str(draft)))
    return next(entry.value for entry in graph.metadata_props if entry.key == PRECISION).partition(" ")[0]


def recalls(
    asked: Setup, concurrency: int, *jobs: tuple[list[Item], dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """recall.figures() of each job, which is questions and how they are asked, and what the server says it served."""
    with serve(asked) as server, Client(server.grpc) as client:
        client.ask(jobs[0][0][0].picture, "Is there a door?", max_tokens=1)
        found = [measure(client, items, concurrency, **options) for items, options in jobs]
        page = terminal.ask(server.health)
    if errors := sum(each["errors"] for each in found):
        raise SystemExit(f"{errors} questions ended in an error")
    return found, {} if page is None else dict(page.weights)


def parser_of(*arguments: tuple[str, dict[str, Any]]) -> argparse.ArgumentParser:
    """The options of both programs, and these."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="only the first N questions, even over the classes")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--pictures", type=Path, help="a folder that keeps the rendered pictures for the next run")
    for flag, how in arguments:
        parser.add_argument(flag, **how)
    add_arguments(parser)
    parser.set_defaults(gpus="")
    return parser


def rendered(options: argparse.Namespace, folder: str) -> list[Item]:
    """The questions, with their pictures in ``--pictures`` or the folder."""
    return heldout_items(options.limit, options.pictures or Path(folder), root=figures.ROOT)


def recall_main() -> int:
    options = parser_of(
        ("--label", {"help": "for other settings than the default's: the figures are recall.LABEL.*"}),
        ("--onnx", {"type": Path, "metavar": "FILE", "help": "a graph of build/vision/export_graph.py to judge"}),
    ).parse_args()
    with tempfile.TemporaryDirectory(prefix="tessera-recall-") as folder:
        graph = use_graph(Path(folder) / "cache", options.onnx) if options.onnx else None
        items = rendered(options, folder)
        large = [item for item in items if max(item.width, item.height) >= recall.LARGE]
        (default, one_tile), _ = recalls(setup(options), options.concurrency, (items, {}), (large, {"max_tiles": 1}))
    notes = {"pictures": len(items), **setup_notes(options)}
    # A part of the set is a check of one machine against another; only the whole gives the figures that count.
    prefix = ".".join(filter(None, ["recall", options.label or graph, "sample" if options.limit else ""]))
    for name in ("macro", "min_class", "precision"):
        figures.emit(f"{prefix}.{name}", round(default[f"recall.{name}"], 4), "share", ceiling=1, **notes)
    whole, alone = (found["large"]["presence"]["balanced_accuracy"] for found in (default, one_tile))
    loss = round(100 * (whole - alone), 2)
    figures.emit(f"{prefix}.max_tiles_1_loss", loss, "points", large_pictures=len(large))
    figures.emit(f"{prefix}.qpm", default["qpm"], "questions/min", **notes)
    return 0


def quantization_main() -> int:
    on_load = {"nargs": "*", "choices": list(ON_LOAD), "default": list(ON_LOAD), "help": "which of them beside bf16"}
    options = parser_of(
        ("--made", {"nargs": "*", "default": [], "metavar": "METHOD=FOLDER"}),
        ("--on-load", on_load),
        ("--policies", {"nargs": "+", "choices": list(BOTH), "default": list(BOTH)}),
    ).parse_args()
    made = {method: Path(folder) for method, folder in pairs(options.made, "METHOD=FOLDER").items()}
    methods = {"bf16": {"quantization": "checkpoint"}} | {method: ON_LOAD[method] for method in options.on_load}
    variants = {method: (options.checkpoint, settings) for method, settings in methods.items()}
    variants |= {method: (folder, {}) for method, folder in made.items()}
    original: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="tessera-recall-") as folder:
        items = rendered(options, folder)
        for name, (checkpoint, settings) in variants.items():
            asked = setup(options)
            asked = replace(asked, checkpoint=checkpoint, settings={**asked.settings, **settings})
            found, served = recalls(asked, options.concurrency, *((items, BOTH[each]) for each in options.policies))
            macros = {policy: 100 * each["recall.macro"] for policy, each in zip(options.policies, found)}
            original = original or macros
            drops = {policy: original[policy] - macro for policy, macro in macros.items()}
            print(f"{name} ({served}): {macros}, drops {drops}", file=sys.stderr, flush=True)
            if macros is not original:
                notes = {"questions": len(items), "served": served, "macro": macros, "drops": drops}
                # Only the whole set at both policies gives the figures that count.
                whole = options.limit is None and len(drops) == len(BOTH)
                prefix = "quant" if whole else "quant.sample"
                figures.emit(f"{prefix}.recall_drop.{name}", round(max(drops.values()), 2), "points", **notes)
    return 0
