"""JPEG bytes to tiles, Pillow against both resize modes (`make bench NAME=preprocess`).

Pillow does what the reference processor does: decode, resize to the grid (bicubic), crop tile by tile, resize the
thumbnail; the tiles end as one uint8 array, as ours do. All sides get the same JPEG bytes and tile plan and one thread,
and take turns picture by picture, so that a busy machine slows all of them alike. A picture's time is the median of its
rounds. Which pictures: those of the standard workloads (smooth colour fields with noise, quality 90).
"""

from __future__ import annotations

import argparse
import io
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import figures
import numpy as np
import workloads
from PIL import Image

from tessera.preprocess.decode import RESIZE_MODES, use_one_thread
from tessera.preprocess.preprocessor import Picture, Preprocessor, PreprocessSettings

CHECKPOINT = figures.ROOT / "build" / "default_model" / "checkpoint"
# (width, height) -> how many distinct pictures
SIZES = {(448, 448): 8, (480, 320): 8, (1280, 720): 4, (1920, 1080): 3, (3840, 2160): 2}
SEED = 5


def pillow_tiles(picture: Picture, side: int) -> np.ndarray:
    """The reference processor's tiles of a picture, uint8 [t, side, side, 3]."""
    image = Image.open(io.BytesIO(picture.data)).convert("RGB")
    count, rows, columns = picture.plan.wire
    grid = image.resize((columns * side, rows * side), Image.Resampling.BICUBIC)
    corners = [(column * side, row * side) for row in range(rows) for column in range(columns)]
    tiles = [grid.crop((left, top, left + side, top + side)) for left, top in corners]
    if count > rows * columns:
        tiles.append(image.resize((side, side), Image.Resampling.BICUBIC))
    return np.stack([np.asarray(tile) for tile in tiles])


def milliseconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def compare(
    preprocessors: dict[str, Preprocessor], size: tuple[int, int], pictures: int, rounds: int
) -> dict[str, Any]:
    """One row of the table: ms per picture for Pillow and each mode, Pillow's over theirs, grey levels between them."""
    times: dict[str, list[float]] = {name: [] for name in ("pillow", *preprocessors)}
    means: dict[str, list[float]] = {name: [] for name in preprocessors}
    most = dict.fromkeys(preprocessors, 0)
    any_of_them = next(iter(preprocessors.values()))
    side = any_of_them.family.unit_shape[0]
    for number in range(pictures):
        jpeg = workloads.picture(*size, (SEED, *size, number))
        picture = any_of_them.picture(jpeg, any_of_them.policy)
        calls: dict[str, Callable[[], np.ndarray]] = {"pillow": lambda picture=picture: pillow_tiles(picture, side)}
        for name, preprocessor in preprocessors.items():
            calls[name] = lambda picture=picture, ours=preprocessor: ours.pixels([picture])
        expected = calls["pillow"]().astype(int)
        for name in preprocessors:
            difference = np.abs(calls[name]().reshape(expected.shape) - expected)
            means[name].append(float(difference.mean()))
            most[name] = max(most[name], int(difference.max()))
        taken = [{name: milliseconds(call) for name, call in calls.items()} for _ in range(rounds)]
        for name in times:
            times[name].append(statistics.median(one[name] for one in taken))
    mean = {name: statistics.mean(values) for name, values in times.items()}
    row: dict[str, Any] = {
        "size": f"{size[0]}x{size[1]}",
        "tiles": picture.plan.cost,
        "pillow_ms": round(mean["pillow"], 2),
    }
    for name in preprocessors:
        row[name] = {
            "ms": round(mean[name], 2),
            "pillow_over": round(mean["pillow"] / mean[name], 2),
            "mean_difference": round(statistics.mean(means[name]), 4),
            "max_difference": most[name],
        }
    return row


def overall(rows: list[dict[str, Any]], mode: str) -> float:
    """The geometric mean of a mode's ratios over all sizes."""
    return math.exp(statistics.mean(math.log(row[mode]["pillow_over"]) for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    preprocessors = {}
    for mode in RESIZE_MODES:
        use_one_thread(mode)
        preprocessors[mode] = Preprocessor.from_checkpoint(CHECKPOINT, PreprocessSettings(resize=mode))
    rows = []
    for size, pictures in SIZES.items():
        rows.append(compare(preprocessors, size, pictures, arguments.rounds))
        print(line(rows[-1]), flush=True)
    notes: dict[str, Any] = {"rounds": arguments.rounds, "pictures": sum(SIZES.values()), "pillow": Image.__version__}
    theirs = sum(row["pillow_ms"] for row in rows)
    for mode in RESIZE_MODES:
        notes[f"{mode}_of_sums"] = round(theirs / sum(row[mode]["ms"] for row in rows), 2)
    notes["fast"] = round(overall(rows, "fast"), 2)
    value = round(overall(rows, "reference"), 2)
    figures.emit("preprocess.opencv_over_pillow", value, "ratio", **notes, table=rows)
    return 0


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    modes = (
        f"{mode} {row[mode]['ms']:7.2f} ms = {row[mode]['pillow_over']:5.2f}x, differs by mean "
        f"{row[mode]['mean_difference']:.4f}, max {row[mode]['max_difference']}"
        for mode in RESIZE_MODES
    )
    return f"{row['size']:>9} {row['tiles']:2} tiles  Pillow {row['pillow_ms']:7.2f} ms  " + "  ".join(modes)


if __name__ == "__main__":
    raise SystemExit(main())
