"""Big pictures on the GPU against the CPU (`make bench NAME=gpu_preprocess`; ends without one).

The CPU side is preprocess's own: one thread, libjpeg-turbo through OpenCV, then the `reference` resize to the grid and
the thumbnail. The GPU side is the vision stage's: the file's bytes in host memory, nvJPEG (which uploads them), chroma
and colours, resize, tiles left on the GPU; each call ends with a synchronisation.

`preprocess.gpu_4k_resize_ratio` compares the same work on both: a decoded 3840x2160 picture (uint8 RGB in page-locked
host memory) to tiles, the GPU's upload of these 25 MB included and decoding in neither; `from_ordinary_memory` is the
same from memory that is not page-locked. `whole` is the ratio that a request sees: file to tiles, decoding in both.
The CPU's resize is the whole less its decoding.

Grey levels are compared with the CPU's for a colour field (the standard workloads' picture) and for a page of coloured
letters, once as we decode and once by nvJPEG's own RGB, which is what torchvision's decoder gives.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import cv2
import figures
import numpy as np
import torch
import workloads

from tessera.family.encoded_picture import EncodedPicture
from tessera.family.family import ImagePlan
from tessera.preprocess.decode import decode
from tessera.preprocess.preprocessor import Preprocessor
from tessera.preprocess.resize_cpu import use_one_thread
from tessera.vision.gpu_pictures import Cut, GpuPictures
from tessera.vision.jpeg_planes import cut, tiles_of_planes
from tessera.vision.nvjpeg import OUTPUT_RGB, NvJpeg

CHECKPOINT = figures.ROOT / "build" / "default_model" / "checkpoint"
COMMAND = "make bench NAME=gpu_preprocess"
SIZES = [(448, 448), (640, 480), (1280, 720), (1920, 1080), (2560, 1440), (3840, 2160), (7680, 4320)]
COMPARED = [(448, 448), (1920, 1080), (3840, 2160), (7680, 4320)]
FOUR_K = (3840, 2160)
SEED = 7


def page(width: int, height: int) -> bytes:
    """A JPEG of small coloured letters on white, where coarse chroma shows most."""
    dice = np.random.default_rng((SEED, width, height))
    image = np.full((height, width, 3), 255, np.uint8)
    for y in range(16, height, 22):
        for x in range(4, width - 60, 150):
            colour = dice.integers(0, 200, 3).tolist()
            cv2.putText(
                image, f"{dice.integers(1 << 30):x}", (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.5, colour, 1, cv2.LINE_AA
            )
    encoded, jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, workloads.JPEG_QUALITY])
    assert encoded
    return jpeg.tobytes()


class Sides:
    """Both sides of the comparison for one picture."""

    def __init__(self, preprocessor: Preprocessor, decoder: Any, nvjpeg: Any, device: str, jpeg: bytes) -> None:
        self._preprocessor, self._decoder, self._nvjpeg, self._device = preprocessor, decoder, nvjpeg, device
        self.jpeg, self.data = jpeg, np.frombuffer(jpeg, np.uint8)
        self.image = decode(jpeg)
        height, width = self.image.shape[:2]
        self.plan: ImagePlan = preprocessor.family.plan(width, height, preprocessor.policy)
        grid = (self.plan.w, self.plan.columns, self.plan.rows, self.plan.thumbnail)
        self.grid = grid
        self.cut = Cut(EncodedPicture(self.data, width, height), *grid)
        self.planes = nvjpeg.planes(self.data)
        self.locked = torch.from_numpy(self.image)
        if device != "cpu":
            self.locked = self.locked.pin_memory()

    def cpu_decode(self) -> np.ndarray:
        return decode(self.jpeg)

    def cpu_whole(self) -> np.ndarray:
        return self._preprocessor.pixels([self.jpeg], [self.plan])

    def gpu_decode(self) -> list[torch.Tensor]:
        return self._nvjpeg.planes(self.data)

    def gpu_tiles(self) -> torch.Tensor:
        """Planes on the GPU to tiles."""
        return tiles_of_planes(self.planes, 1, *self.grid)

    def gpu_whole(self) -> torch.Tensor:
        return self._decoder.tiles(self.cut)

    def gpu_resize(self) -> torch.Tensor:
        """A decoded picture in page-locked host memory to tiles."""
        return self._resized(self.locked)

    def gpu_resize_unlocked(self) -> torch.Tensor:
        return self._resized(torch.from_numpy(self.image))

    def _resized(self, image: torch.Tensor) -> torch.Tensor:
        pixels = image.to(self._device, non_blocking=True).permute(2, 0, 1)
        return cut((channel.float() for channel in pixels), *self.grid)

    def differences(self) -> dict[str, dict[str, float]]:
        """Grey levels from the CPU's tiles, of our decoding and of nvJPEG's own RGB with the same resize."""
        expected = self.cpu_whole().reshape(self.plan.pixel_shape)
        plain = cut((channel.float() for channel in self._nvjpeg.planes(self.data, OUTPUT_RGB)), *self.grid)
        return {"ours": grey_levels(self.gpu_whole(), expected), "nvjpeg_rgb": grey_levels(plain, expected)}


def grey_levels(found: torch.Tensor, expected: np.ndarray) -> dict[str, float]:
    counts = np.bincount(np.abs(found.cpu().numpy().astype(np.int16) - expected).ravel(), minlength=256)
    below = np.cumsum(counts) / counts.sum()
    mean = float((counts * np.arange(256)).sum() / counts.sum())
    return {"mean": round(mean, 4), "p99.9": int(np.searchsorted(below, 0.999)), "max": int(counts.nonzero()[0][-1])}


class StandIn:
    """For trials without a GPU: OpenCV's planes with every second chroma sample. Its figures mean nothing."""

    def planes(self, data: np.ndarray, output: int = 0) -> list[torch.Tensor]:
        pixels = decode(data.tobytes())
        if output == OUTPUT_RGB:
            return list(torch.from_numpy(pixels).permute(2, 0, 1))
        luma, red, blue = cv2.split(cv2.cvtColor(pixels, cv2.COLOR_RGB2YCrCb))
        return [torch.from_numpy(np.ascontiguousarray(plane)) for plane in (luma, blue[::2, ::2], red[::2, ::2])]

    def tiles(self, cut: Cut) -> torch.Tensor:
        return tiles_of_planes(self.planes(cut.picture.data), 1, cut.side, cut.columns, cut.rows, cut.thumbnail)


def milliseconds(call: Callable[[], Any], rounds: int, device: str) -> float:
    """The median of the rounds, each with its synchronisation, after two that do not count."""
    synchronize = torch.cuda.synchronize if device != "cpu" else lambda: None
    taken = []
    for _ in range(rounds + 2):
        synchronize()
        started = time.perf_counter()
        call()
        synchronize()
        taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken[2:])


def row_of(sides: Sides, rounds: int, device: str) -> dict[str, Any]:
    """One size's times in ms and their ratios."""
    ms = {
        "cpu_decode": milliseconds(sides.cpu_decode, max(3, rounds // 3), "cpu"),
        "cpu_whole": milliseconds(sides.cpu_whole, max(3, rounds // 3), "cpu"),
        "gpu_decode": milliseconds(sides.gpu_decode, rounds, device),
        "gpu_tiles": milliseconds(sides.gpu_tiles, rounds, device),
        "gpu_whole": milliseconds(sides.gpu_whole, rounds, device),
        "gpu_resize": milliseconds(sides.gpu_resize, rounds, device),
        "gpu_resize_unlocked": milliseconds(sides.gpu_resize_unlocked, rounds, device),
    }
    ms["cpu_resize"] = max(0.0, ms["cpu_whole"] - ms["cpu_decode"])
    height, width = sides.image.shape[:2]
    return {
        "size": f"{width}x{height}",
        "pixels": width * height,
        "tiles": sides.plan.t,
        "file_bytes": len(sides.jpeg),
        **{f"{name}_ms": round(value, 3) for name, value in ms.items()},
        "unlocked_ratio": round(ms["cpu_resize"] / ms["gpu_resize_unlocked"], 2),
        "resize_ratio": round(ms["cpu_resize"] / ms["gpu_resize"], 2),
        "whole_ratio": round(ms["cpu_whole"] / ms["gpu_whole"], 2),
    }


def memory_row(sides: Sides) -> dict[str, int]:
    """Bytes that one picture takes on the GPU in a decoder of its own, and what was announced for it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    decoder = GpuPictures("cuda")
    tiles = decoder.tiles(sides.cut)
    torch.cuda.synchronize()
    own = free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
    peak = torch.cuda.max_memory_allocated() - before
    del tiles
    return {"torch": peak, "nvjpeg": own, "nvjpeg_a_pixel": round(own / sides.image.shape[0] / sides.image.shape[1], 2),
            "announced": sides.cut.peak_bytes}  # fmt: skip


def crossover(rows: list[dict[str, Any]], cores: int) -> int | None:
    """Pixels of the smallest measured size from which on the GPU is quicker than so many cores; None if it never is."""
    slower = [row["pixels"] for row in rows if row["gpu_whole_ms"] * cores > row["cpu_whole_ms"]]
    quicker = [row["pixels"] for row in rows if row["pixels"] > max(slower, default=0)]
    return min(quicker, default=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cores", type=int, default=8, help="preprocess instances to compare the GPU's rate with")
    parser.add_argument("--trial", action="store_true", help="on the CPU at small sizes: does it run?")
    arguments = parser.parse_args()
    device = "cpu" if arguments.trial else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("bench_gpu_preprocess: no GPU here, left out")
        return 0
    use_one_thread("reference")
    preprocessor = Preprocessor.from_checkpoint(CHECKPOINT)
    nvjpeg: Any = StandIn() if arguments.trial else NvJpeg(device)
    decoder: Any = nvjpeg if arguments.trial else GpuPictures(device)

    def sides(jpeg: bytes) -> Sides:
        return Sides(preprocessor, decoder, nvjpeg, device, jpeg)

    rows, differences = [], []
    for size in SIZES[:2] if arguments.trial else SIZES:
        field = sides(workloads.picture(*size, (SEED, *size)))
        rows.append(row_of(field, arguments.rounds, device))
        if device == "cuda":
            rows[-1]["memory"] = memory_row(field)
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        if size in COMPARED:
            found = {"field": field.differences(), "page": sides(page(*size)).differences()}
            differences.append({"size": f"{size[0]}x{size[1]}", **found})
            print(f"  grey levels from the CPU's: {found}", flush=True)
    if arguments.trial:
        return 0
    (four_k,) = [row for row in rows if row["size"] == "{}x{}".format(*FOUR_K)]
    figures.emit("preprocess.gpu_4k_resize_ratio", four_k["resize_ratio"], "ratio", command=COMMAND,
                 from_ordinary_memory=four_k["unlocked_ratio"], whole=four_k["whole_ratio"],
                 rounds=arguments.rounds, table=rows)  # fmt: skip
    worst = [kind["ours"] for row in differences for kind in (row["field"], row["page"])]
    figures.emit("preprocess.gpu_grey_levels_p99_9", max(levels["p99.9"] for levels in worst), "grey levels",
                 command=COMMAND, mean=max(levels["mean"] for levels in worst), bound="mean <= 1, p99.9 <= 8",
                 table=differences)  # fmt: skip
    figures.emit("preprocess.gpu_crossover_pixels", crossover(rows, arguments.cores) or 0, "pixels", command=COMMAND,
                 cores=arguments.cores, against_one_core=crossover(rows, 1), is_0="never")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
