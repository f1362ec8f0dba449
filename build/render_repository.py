"""Writes a model repository whose named config `tensorrt` fits the plan of another checkpoint (docs/tensorrt.md).

    python build/render_repository.py --tensorrt CHECKPOINT --max-tiles 32 --out DIR
    tessera serve --model-repository DIR --checkpoint CHECKPOINT --model-config-name tensorrt

All other settings are options of `tessera serve`. The tracked files stay untouched.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python_backends"))

from tessera.errors import CheckpointError, TesseraError
from tessera.launcher.settings import config_file, read_config
from tessera.models.registry import read_config as read_checkpoint

SOURCE = Path(__file__).resolve().parent.parent / "model_repository"


@dataclass(frozen=True)
class PlanShape:
    """What the named config `tensorrt` says of a plan: ``side`` of a tile in pixels, ``rows`` a tile of ``hidden``
    numbers each, ``max_tiles`` of the profile."""

    side: int
    rows: int
    hidden: int
    max_tiles: int

    @staticmethod
    def of_checkpoint(folder: Path, max_tiles: int) -> PlanShape:
        """Raises CheckpointError for a folder that holds no known checkpoint, or one of a model without tiles."""
        config = read_checkpoint(folder)
        if not hasattr(config.vision, "tokens_per_tile"):
            raise CheckpointError(f"{folder}: {config.layout} cuts no tiles, which are what the plan is for")
        return PlanShape(config.vision.image_size, config.vision.tokens_per_tile, config.text.hidden_size, max_tiles)

    def buckets(self) -> list[int]:
        """Numbers of tiles that get a CUDA graph: powers of two and the maximum."""
        return [1 << power for power in range(self.max_tiles.bit_length()) if 1 << power < self.max_tiles] + [
            self.max_tiles
        ]


def render(out: Path, plan: PlanShape) -> None:
    """Copies model_repository/ to `out`, which must not exist, and fits its named config `tensorrt` to the plan."""
    shutil.copytree(SOURCE, out, ignore=shutil.ignore_patterns("__pycache__"))
    tile = [plan.side, plan.side, 3]
    file = config_file(out, "preprocess", "tensorrt")
    preprocess = read_config(file)
    preprocess.parameters["max_cost"].string_value = str(plan.max_tiles)
    next(output for output in preprocess.output if output.name == "TILES").dims[:] = [-1, *tile]
    file.write_text(str(preprocess))
    file = config_file(out, "vision_encoder", "tensorrt")
    vision = read_config(file)
    vision.max_batch_size = plan.max_tiles
    vision.input[0].dims[:] = tile
    vision.output[0].dims[:] = [plan.rows, plan.hidden]
    del vision.optimization.cuda.graph_spec[:]
    least = 1
    for bucket in plan.buckets():
        graph = vision.optimization.cuda.graph_spec.add(batch_size=bucket)
        graph.input["TILES"].dim[:] = tile
        graph.graph_lower_bound.batch_size = least
        graph.graph_lower_bound.input["TILES"].dim[:] = tile
        least = bucket + 1
    file.write_text(str(vision))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tensorrt", type=Path, required=True, metavar="CHECKPOINT", help="whose plan it is")
    parser.add_argument("--max-tiles", type=int, default=32, help="of the plan's profile (%(default)s)")
    arguments = parser.parse_args()
    try:
        if arguments.max_tiles < 1:
            raise ValueError(f"--max-tiles wants 1 or more, not {arguments.max_tiles}")
        render(arguments.out, PlanShape.of_checkpoint(arguments.tensorrt, arguments.max_tiles))
    except (OSError, ValueError, TesseraError) as error:
        print(f"render_repository: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
