"""JPEG to tiles (`make bench NAME=preprocess`): Pillow, both resize modes on the CPU and, where there is one, the GPU.

Pillow does what the reference processor does: decode, resize to the grid (bicubic), crop tile by tile, resize the
thumbnail. The CPU's ways have one thread and take turns picture by picture, so that a busy machine slows all of them
alike; their pictures are those of the standard workloads. The GPU's side is the vision stage's: the files' bytes in
host memory, nvImageCodec, resize and cut, pixels left on the GPU; it is asked about small coloured letters on white,
where coarse chroma shows most, in batches, against all cores in the `reference` mode.

`preprocess.gpu_4k_resize_ratio` compares the same work on both: a decoded 3840x2160 picture (in page-locked host
memory) to tiles, the GPU's upload of these 25 MB included and decoding in neither.
"""

from __future__ import annotations

import argparse
import io
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import geometric_mean, mean, median
from typing import Any

import cv2
import figures
import numpy as np
import torch
import workloads
from PIL import Image

from tessera.preprocess.decode import RESIZE_MODES, decode, use_one_thread
from tessera.preprocess.preprocessor import Picture, Preprocessor, PreprocessRequest, PreprocessSettings
from tessera.vision.pictures import GpuDecoder, Undecoded, VisionItem, pictures_of, pixels_of

CHECKPOINT = figures.ROOT / "build" / "default_model" / "checkpoint"
# (width, height) -> how many distinct pictures
SIZES = {(448, 448): 8, (480, 320): 8, (1280, 720): 4, (1920, 1080): 3, (3840, 2160): 2}
GPU_SIZES = [(448, 448), (1280, 720), (1919, 1081), (1920, 1080), (3840, 2160), (7680, 4320)]
FOUR_K = (3840, 2160)
DECODE_BYTES = 2 << 30  # the vision stage's default
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


def milliseconds(call: Callable[[], Any], wait: Callable[[], object] = lambda: None) -> float:
    wait()
    started = time.perf_counter()
    call()
    wait()
    return 1e3 * (time.perf_counter() - started)


def compare(
    preprocessors: dict[str, Preprocessor], size: tuple[int, int], pictures: int, rounds: int
) -> dict[str, Any]:
    """One row of the table: ms per picture for Pillow and each mode, Pillow's over theirs, grey levels between them."""
    times: list[dict[str, float]] = []
    differences: dict[str, list[np.ndarray]] = {name: [] for name in preprocessors}
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
            differences[name].append(np.abs(calls[name]().reshape(expected.shape) - expected))
        taken = [{name: milliseconds(call) for name, call in calls.items()} for _ in range(rounds)]
        times.append({name: median(one[name] for one in taken) for name in calls})
    ms = {name: mean(one[name] for one in times) for name in times[0]}
    row = {"size": "{}x{}".format(*size), "tiles": picture.plan.cost, "pillow_ms": round(ms["pillow"], 2)}
    return row | {
        name: {
            "ms": round(ms[name], 2),
            "pillow_over": round(ms["pillow"] / ms[name], 2),
            "mean_difference": round(mean(float(each.mean()) for each in found), 4),
            "max_difference": max(int(each.max()) for each in found),
        }
        for name, found in differences.items()
    }


def on_cpu(rounds: int) -> None:
    """The table of Pillow and both modes, and Pillow's time over ours: the geometric mean over all sizes."""
    preprocessors = {}
    for mode in RESIZE_MODES:
        use_one_thread(mode)
        preprocessors[mode] = Preprocessor.from_checkpoint(CHECKPOINT, PreprocessSettings(resize=mode))
    rows = []
    for size, pictures in SIZES.items():
        rows.append(compare(preprocessors, size, pictures, rounds))
        print(rows[-1], flush=True)
    ratios = {mode: round(geometric_mean(row[mode]["pillow_over"] for row in rows), 2) for mode in RESIZE_MODES}
    figures.emit("preprocess.opencv_over_pillow", ratios["reference"], "ratio", fast=ratios["fast"], table=rows)


def letters(width: int, height: int) -> bytes:
    """A JPEG of small coloured letters on white."""
    dice = np.random.default_rng((SEED, width, height))
    image = np.full((height, width, 3), 255, np.uint8)
    for y in range(16, height, 22):
        for x in range(4, width - 60, 150):
            colour, text = dice.integers(0, 200, 3).tolist(), f"{dice.integers(1 << 30):x}"
            cv2.putText(image, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.5, colour, 1, cv2.LINE_AA)
    return cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, workloads.JPEG_QUALITY])[1].tobytes()


class Ways:
    """Both ways from files to pixels."""

    def __init__(self) -> None:
        self.here = Preprocessor.from_checkpoint(CHECKPOINT)
        self.there = Preprocessor.from_checkpoint(CHECKPOINT, PreprocessSettings(gpu_pixels=1))
        self.decoder = GpuDecoder("cuda", DECODE_BYTES)

    def cpu(self, jpeg: bytes) -> np.ndarray:
        return self.here(PreprocessRequest(text="", images=[jpeg])).pixels

    def undecoded(self, jpeg: bytes) -> Undecoded:
        found = self.there(PreprocessRequest(text="", images=[jpeg]))
        item = VisionItem(found.pixels, found.plan, found.digest)
        (picture,) = pictures_of(item, self.there.family, self.decoder)
        assert picture.encoded
        return picture.encoded

    def gpu(self, line: list[Undecoded]) -> list[torch.Tensor]:
        """All of a line, in as many batches as it takes."""
        found: list[Any] = []
        while len(found) < len(line):
            found += self.decoder.pixels(line[len(found) :])
        for error in found:
            if isinstance(error, Exception):
                raise error
        return found


def row_of(ways: Ways, size: tuple[int, int], rounds: int, cores: int, batch: int) -> dict[str, Any]:
    """One size: pictures a second of both, ms of resizing alone, grey levels between them."""
    jpeg = letters(*size)
    undecoded = ways.undecoded(jpeg)
    locked = torch.from_numpy(decode(jpeg)).pin_memory()
    calls = {
        "cpu_decode": lambda: decode(jpeg),
        "cpu": lambda: ways.cpu(jpeg),
        "gpu": lambda: ways.gpu([undecoded]),
        "gpu_resize": lambda: pixels_of(locked.to("cuda", non_blocking=True).permute(2, 0, 1), 1, undecoded[1]),
        "gpu_batch": lambda: ways.gpu([undecoded] * batch),
    }
    ms = {
        name: median([milliseconds(call, torch.cuda.synchronize) for _ in range(rounds)][2:])
        for name, call in calls.items()
    }
    with ThreadPoolExecutor(cores) as pool:
        count = cores * rounds // 2
        spent = milliseconds(lambda: list(pool.map(ways.cpu, [jpeg] * count)))
    cpu_rate, gpu_rate = 1e3 * count / spent, 1e3 * batch / ms["gpu_batch"]
    (found,) = ways.gpu([undecoded])
    difference = np.abs(found.cpu().numpy().astype(np.int16) - ways.cpu(jpeg))
    return {
        "size": "{}x{}".format(*size),
        "pixels": size[0] * size[1],
        **{f"{name}_ms": round(value, 3) for name, value in ms.items()},
        "cpu_per_second": round(cpu_rate, 1),
        "gpu_per_second": round(gpu_rate, 1),
        "rate_ratio": round(gpu_rate / cpu_rate, 2),
        "resize_ratio": round(max(0.0, ms["cpu"] - ms["cpu_decode"]) / ms["gpu_resize"], 2),
        "grey_levels": {
            "mean": round(float(difference.mean()), 4),
            "p99.9": int(np.quantile(difference, 0.999)),
            "max": int(difference.max()),
        },
    }


def on_gpu(rounds: int, cores: int, batch: int) -> None:
    """The table of the GPU and all cores. Crossover: pixels of the smallest size from which on the GPU is quicker."""
    use_one_thread("reference")
    ways, rows = Ways(), []
    for size in GPU_SIZES:
        rows.append(row_of(ways, size, rounds, cores, batch))
        print(rows[-1], flush=True)
    four_k = rows[GPU_SIZES.index(FOUR_K)]
    notes: dict[str, Any] = {"cores": cores, "batch": batch}
    figures.emit("preprocess.gpu_4k_resize_ratio", four_k["resize_ratio"], "ratio")
    figures.emit("preprocess.gpu_4k_rate", four_k["gpu_per_second"], "pictures/s", **notes, table=rows)
    worst = max(row["grey_levels"]["p99.9"] for row in rows)
    figures.emit("preprocess.gpu_grey_levels_p99_9", worst, "grey levels")
    slower = max((row["pixels"] for row in rows if row["rate_ratio"] < 1), default=0)
    crossover = min((row["pixels"] for row in rows if row["pixels"] > slower), default=0)
    figures.emit("preprocess.gpu_crossover_pixels", crossover, "pixels", **notes, is_0="never")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=32, help="pictures that the GPU decodes at once, where they fit")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="threads of the CPU's rate")
    options = parser.parse_args()
    on_cpu(options.rounds)
    if torch.cuda.is_available():
        on_gpu(options.rounds, options.cores, options.batch)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
