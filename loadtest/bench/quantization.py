"""What quantized weights cost in recall: the whole held-out set through the ensemble (`make bench NAME=quantization`).

The default checkpoint as it is, then each quantized variant, all by one machine and load: `fp8` (the language model,
quantized on load), `fp8_vision` (the vision tower), `fp8_kv` (keys and values in the cache), and checkpoints that
`tessera quantize` wrote (`--made`). Each is asked all 4,524 questions twice: at its own tile policy, where nearly
everything is right, and at one tile a picture, where there is something to lose. A variant's drop is the larger of the
two, in points of balanced accuracy over the hazard classes; below 0 it lost nothing.

    python loadtest/bench quantization --gpus 0 --instances preprocess=10 --concurrency 64 \\
        --made awq=OUT_AWQ gptq=OUT_GPTQ

A folder's own report, if it compares, gives its divergence from the original beside RTN's (`quant.kl_over_rtn`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import figures
from serving import DEFAULT_CHECKPOINT, Setup, pairs, serve

from bench.recall import bar, measure
from tessera_client import Client
from tessera_command import terminal
from tessera_evaluation.datasets import Item, heldout_items

POLICIES: dict[str, dict[str, Any]] = {"reference": {}, "reference,max_tiles=1": {"max_tiles": 1}}
ON_LOAD = {
    "fp8": {"quantization": "fp8-language"},
    "fp8_vision": {"quantization": "fp8-vision"},
    "fp8_kv": {"language_model.kv_cache_dtype": "fp8"},
}


def recalls(
    setup: Setup, items: list[Item], policies: list[str], concurrency: int
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """recall.figures() of each policy, and what the server says that it served."""
    found = {}
    with serve(setup) as server, Client(server.grpc) as client:
        client.ask(items[0].picture, "Is there a door?", max_tokens=1)
        for policy in policies:
            found[policy] = measure(client, items, concurrency, **POLICIES[policy])
            if errors := found[policy]["errors"]:
                raise SystemExit(f"{errors} questions ended in an error")
        page = terminal.ask(server.health)
    return found, {} if page is None else dict(page.weights)


def divergence_over_rtn(folder: Path) -> float | None:
    """The logits' KL divergence from the original, by that of RTN; None where the report does not compare."""
    report = json.loads((folder / "quantization" / "report.json").read_text())
    kl = {row["name"]: row["kl"] for row in report["rows"]}
    method = report["recipe"]["method"]
    return kl[method] / kl["rtn"] if {method, "rtn"} <= kl.keys() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--made", nargs="*", default=[], metavar="METHOD=FOLDER")
    parser.add_argument(
        "--on-load",
        nargs="*",
        choices=list(ON_LOAD),
        default=list(ON_LOAD),
        help="which of them beside bf16",
    )
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--limit", type=int, help="only the first N questions, even over the classes")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--instances", nargs="*", default=[], metavar="STAGE=N")
    parser.add_argument("--gpus", default="", help="a number; without one the CPU computes")
    parser.add_argument("--pictures", type=Path, help="a folder that keeps the rendered pictures for the next run")
    arguments = parser.parse_args()
    instances = {stage: int(count) for stage, count in pairs(arguments.instances, "STAGE=N").items()}
    made = {method: Path(folder) for method, folder in pairs(arguments.made, "METHOD=FOLDER").items()}
    methods = {"bf16": {"quantization": "checkpoint"}} | {method: ON_LOAD[method] for method in arguments.on_load}
    variants = {method: (DEFAULT_CHECKPOINT, settings) for method, settings in methods.items()}
    variants |= {method: (folder, {}) for method, folder in made.items()}
    original: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="tessera-recall-") as kept:
        with bar("rendering") as advance:
            folder = arguments.pictures or Path(kept)
            items = heldout_items(arguments.limit, folder, root=figures.ROOT, progress=advance)
        for name, (checkpoint, settings) in variants.items():
            gpus = (arguments.gpus,) if arguments.gpus else ()
            setup = Setup(checkpoint=checkpoint, gpus=gpus, settings=settings, instances=instances)
            found, served = recalls(setup, items, arguments.policies, arguments.concurrency)
            original = original or found
            macros = {policy: 100 * found[policy]["recall.macro"] for policy in arguments.policies}
            drops = {policy: 100 * original[policy]["recall.macro"] - macro for policy, macro in macros.items()}
            print(f"{name} ({served}): {macros}, drops {drops}", file=sys.stderr, flush=True)
            if found is not original:
                notes = {"questions": len(items), "served": served, "macro": macros, "drops": drops}
                # Only the whole set at both policies gives the figures that count.
                whole = arguments.limit is None and len(drops) == len(POLICIES)
                prefix = "quant" if whole else "quant.sample"
                figures.emit(f"{prefix}.recall_drop.{name}", round(max(drops.values()), 2), "points", **notes)
    for method, folder in made.items():
        if (ratio := divergence_over_rtn(folder)) is not None:
            figures.emit(f"quant.kl_over_rtn.{method}", round(ratio, 3), "ratio")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
