"""Writes a model repository whose named config `tensorrt` fits the plan of another checkpoint (docs/tensorrt.md).

    python build/vision/plan_repository.py --tensorrt CHECKPOINT --max-tiles 32 --out DIR
    tessera serve --model-repository DIR --checkpoint CHECKPOINT --model-config-name tensorrt

All other settings are options of `tessera serve`. The tracked files stay untouched.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python_backends"))

from tessera.errors import CheckpointError, TesseraError
from tessera.launcher.settings import config_file, read_config
from tessera.models.registry import read_config as read_checkpoint

SOURCE = Path(__file__).resolve().parents[2] / "model_repository"


def render(out: Path, checkpoint: Path, max_tiles: int) -> None:
    """Copies model_repository/ to `out`, which must not exist, and fits its named config `tensorrt` to the plan.

    Raises CheckpointError for a folder that holds no known checkpoint, or one of a model without tiles.
    """
    read = read_checkpoint(checkpoint)
    if not hasattr(read.vision, "tokens_per_tile"):
        raise CheckpointError(f"{checkpoint}: {read.layout} cuts no tiles, which are what the plan is for")
    shutil.copytree(SOURCE, out, ignore=shutil.ignore_patterns("__pycache__"))
    tile = [read.vision.image_size, read.vision.image_size, 3]
    file = config_file(out, "preprocess", "tensorrt")
    preprocess = read_config(file)
    preprocess.parameters["max_cost"].string_value = str(max_tiles)
    next(output for output in preprocess.output if output.name == "TILES").dims[:] = [-1, *tile]
    file.write_text(str(preprocess))
    file = config_file(out, "vision_encoder", "tensorrt")
    vision = read_config(file)
    vision.max_batch_size = max_tiles
    vision.input[0].dims[:] = tile
    vision.output[0].dims[:] = [read.vision.tokens_per_tile, read.text.hidden_size]
    del vision.optimization.cuda.graph_spec[:]
    least = 1
    for tiles in (*(1 << power for power in range((max_tiles - 1).bit_length())), max_tiles):
        graph = vision.optimization.cuda.graph_spec.add(batch_size=tiles)
        graph.input["TILES"].dim[:] = tile
        graph.graph_lower_bound.batch_size = least
        graph.graph_lower_bound.input["TILES"].dim[:] = tile
        least = tiles + 1
    file.write_text(str(vision))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tensorrt", type=Path, required=True, metavar="CHECKPOINT", help="whose plan it is")
    parser.add_argument("--max-tiles", type=int, default=32, help="of the plan's profile (%(default)s)")
    arguments = parser.parse_args(argv)
    try:
        if arguments.max_tiles < 1:
            raise ValueError(f"--max-tiles wants 1 or more, not {arguments.max_tiles}")
        render(arguments.out, arguments.tensorrt, arguments.max_tiles)
    except (OSError, ValueError, TesseraError) as error:
        print(f"plan_repository: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
