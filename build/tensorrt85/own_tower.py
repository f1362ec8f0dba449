"""The times of the service's own tower on this GPU, as a CUDA graph, beside which a plan's stand.

python build/tensorrt85/own_tower.py --checkpoint DIR --reference DIR [--random-weights]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from judge import least_cosine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python_backends"))

from tessera.kernels.tuning import MeasuredChoices, choices_path, graph_milliseconds
from tessera.models.registry import read_config
from tessera.settings.stages import VisionSettings
from tessera.vision.fp8_tower import serving_tower

COUNTS = (1, 8, 32)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True, help="graph85.py's folder")
    parser.add_argument("--random-weights", action="store_true")
    arguments = parser.parse_args()
    settings = VisionSettings("graph", dtype="bfloat16", device="cuda", random_weights=arguments.random_weights)
    tower = serving_tower(read_config(arguments.checkpoint), settings)
    choices = MeasuredChoices(choices_path(), graph_milliseconds)
    samples = np.fromfile(arguments.reference / "tiles.u8", np.uint8).reshape(6, *tower.unit_shape)
    wanted = np.load(arguments.reference / "rows.npy")
    for count in COUNTS:
        tiles = torch.from_numpy(samples[np.arange(count) % 6]).cuda()
        forward = tower.tuned(count, choices)
        rows = forward(tiles).float().cpu().numpy().reshape(count, -1, wanted.shape[-1])
        milliseconds = graph_milliseconds(lambda: forward(tiles))  # noqa: B023
        print(
            f"OWN TOWER {count} tiles, bfloat16, CUDA graph: {milliseconds:.3f} ms, "
            f"{count * 1e3 / milliseconds:.0f} tiles/s, cosine {least_cosine(rows, wanted)[0]:.7f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
