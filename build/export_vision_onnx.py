"""Export the vision tower of a checkpoint to one ONNX file.

    python build/export_vision_onnx.py --checkpoint DIR --out FILE [--target onnxruntime|portable]

``onnxruntime`` (the default) is what the CPU vision stage runs; ``portable`` has standard operators only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python_backends"))

from tessera.checkpoint.config import read_config
from tessera.errors import TesseraError
from tessera.vision.intern_vit import load_vision, vision_fingerprint
from tessera.vision.onnx_graph import TARGETS, vision_graph


def export(checkpoint: Path, out: Path, target: str) -> None:
    """Write the graph of ``checkpoint`` to ``out``, whole or not at all."""
    config = read_config(checkpoint)
    model = vision_graph(load_vision(config), target, vision_fingerprint(config))
    if target == "portable":
        onnx.checker.check_model(model)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(out.name + ".part")
    onnx.save(model, str(unfinished))
    unfinished.replace(out)


def main() -> int:
    parser = argparse.ArgumentParser(description="Export the vision tower of a checkpoint to ONNX.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--target", choices=TARGETS, default="onnxruntime", help="what will read the file")
    args = parser.parse_args()
    try:
        export(args.checkpoint, args.out, args.target)
    except TesseraError as error:
        print(f"export_vision_onnx: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB, target {args.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
