"""Big pictures on the GPU against the CPU (`make bench NAME=gpu_preprocess`; ends without one).

The CPU side is preprocess's own: libjpeg-turbo through OpenCV, then the `reference` resize to the grid and the
thumbnail, one thread a picture and as many at once as there are cores. The GPU side is the vision stage's: the files'
bytes in host memory, nvImageCodec, resize and cut, pixels left on the GPU; alone and in batches.

`preprocess.gpu_4k_resize_ratio` compares the same work on both: a decoded 3840x2160 picture (uint8 RGB in page-locked
host memory) to tiles, the GPU's upload of these 25 MB included and decoding in neither.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import figures
import numpy as np
import torch
import workloads

from tessera.preprocess.decode import decode, use_one_thread
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest, PreprocessSettings
from tessera.vision.pictures import GpuDecoder, Undecoded, VisionItem, bytes_of, pictures_of, pixels_of

CHECKPOINT = figures.ROOT / "build" / "default_model" / "checkpoint"
SIZES = [(448, 448), (1280, 720), (1919, 1081), (1920, 1080), (3840, 2160), (7680, 4320)]
FOUR_K = (3840, 2160)
CAPACITY = 2 << 30  # the vision stage's default
SEED = 7
# What a JPEG may be beside its size: OpenCV's parameters.
KINDS = {
    "4:2:0": [],
    "4:2:2": [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422],
    "4:4:4": [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444],
}


def page(width: int, height: int, kind: str = "4:2:0") -> bytes:
    """A JPEG of small coloured letters on white, where coarse chroma shows most."""
    dice = np.random.default_rng((SEED, width, height))
    image = np.full((height, width, 3), 255, np.uint8)
    for y in range(16, height, 22):
        for x in range(4, width - 60, 150):
            colour = dice.integers(0, 200, 3).tolist()
            cv2.putText(
                image, f"{dice.integers(1 << 30):x}", (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.5, colour, 1, cv2.LINE_AA
            )
    encoded, jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, workloads.JPEG_QUALITY, *KINDS[kind]])
    assert encoded
    return jpeg.tobytes()


def grey_levels(found: torch.Tensor, expected: np.ndarray) -> dict[str, float]:
    counts = np.bincount(np.abs(found.cpu().numpy().astype(np.int16) - expected).ravel(), minlength=256)
    below = np.cumsum(counts) / counts.sum()
    mean = float((counts * np.arange(256)).sum() / counts.sum())
    return {"mean": round(mean, 4), "p99.9": int(np.searchsorted(below, 0.999)), "max": int(counts.nonzero()[0][-1])}


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


class Ways:
    """Both ways from files to pixels."""

    def __init__(self, device: str) -> None:
        self.here = Preprocessor.from_checkpoint(CHECKPOINT)
        self.there = Preprocessor.from_checkpoint(CHECKPOINT, PreprocessSettings(gpu_pixels=1))
        self.device, self.decoder = device, GpuDecoder(device, CAPACITY)

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


def row_of(ways: Ways, jpeg: bytes, rounds: int, cores: int, batch: int) -> dict[str, Any]:
    """One size's times in ms and rates, and the share of the GPU's memory that a batch took."""
    image, undecoded = decode(jpeg), ways.undecoded(jpeg)
    views, line = undecoded[1], [undecoded] * batch
    locked = torch.from_numpy(image).pin_memory()

    def upload_and_resize() -> torch.Tensor:
        return pixels_of(locked.to(ways.device, non_blocking=True).permute(2, 0, 1), 1, views)

    few = max(3, rounds // 4)
    ms = {
        "cpu_decode": milliseconds(lambda: decode(jpeg), few, "cpu"),
        "cpu": milliseconds(lambda: ways.cpu(jpeg), few, "cpu"),
        "gpu": milliseconds(lambda: ways.gpu([undecoded]), rounds, ways.device),
        "gpu_resize": milliseconds(upload_and_resize, rounds, ways.device),
        "gpu_batch": milliseconds(lambda: ways.gpu(line), few, ways.device),
    }
    with ThreadPoolExecutor(cores) as pool:
        count = cores * max(2, few // 2)
        list(pool.map(ways.cpu, [jpeg] * cores))
        started = time.perf_counter()
        list(pool.map(ways.cpu, [jpeg] * count))
        cpu_rate = count / (time.perf_counter() - started)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    ways.gpu([undecoded])
    torch.cuda.synchronize()
    own = free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
    height, width = image.shape[:2]
    gpu_rate = 1e3 * batch / ms["gpu_batch"]
    return {
        "size": f"{width}x{height}",
        "pixels": width * height,
        "file_bytes": len(jpeg),
        **{f"{name}_ms": round(value, 3) for name, value in ms.items()},
        "batch": batch,
        "cpu_per_second": round(cpu_rate, 1),
        "gpu_per_second": round(gpu_rate, 1),
        "rate_ratio": round(gpu_rate / cpu_rate, 2),
        "resize_ratio": round(max(0.0, ms["cpu"] - ms["cpu_decode"]) / ms["gpu_resize"], 2),
        "announced_bytes": bytes_of([undecoded]),
        "torch_bytes": torch.cuda.max_memory_allocated(),
        "decoder_bytes_beyond_before": own,
    }


def crossover(rows: list[dict[str, Any]]) -> int:
    """Pixels of the smallest measured size from which on the GPU is quicker than all cores; 0 if it never is."""
    slower = [row["pixels"] for row in rows if row["rate_ratio"] < 1]
    return min((row["pixels"] for row in rows if row["pixels"] > max(slower, default=0)), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="pictures decoded at once, where they fit")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="threads of the CPU's rate")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_preprocess: no GPU here, left out")
        return 0
    use_one_thread("reference")
    ways = Ways("cuda")
    rows, differences = [], []
    for size in SIZES:
        for name, jpeg in {
            "field": workloads.picture(*size, (SEED, *size)),
            **{f"page {kind}": page(*size, kind) for kind in KINDS},
        }.items():
            (found,) = ways.gpu([ways.undecoded(jpeg)])
            differences.append({"size": "{}x{}".format(*size), "picture": name, **grey_levels(found, ways.cpu(jpeg))})
            print(f"grey levels from the CPU's: {differences[-1]}", flush=True)
        rows.append(row_of(ways, page(*size), arguments.rounds, arguments.cores, arguments.batch))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    (four_k,) = [row for row in rows if row["size"] == "{}x{}".format(*FOUR_K)]
    notes = {"cores": arguments.cores, "batch": arguments.batch}
    figures.emit("preprocess.gpu_4k_resize_ratio", four_k["resize_ratio"], "ratio")
    figures.emit("preprocess.gpu_4k_rate", four_k["gpu_per_second"], "pictures/s", **notes,
                 over_all_cores=four_k["rate_ratio"], table=rows)  # fmt: skip
    figures.emit("preprocess.gpu_grey_levels_p99_9", max(row["p99.9"] for row in differences), "grey levels",
                 mean=max(row["mean"] for row in differences),
                 worst=max(row["max"] for row in differences), table=differences)  # fmt: skip
    figures.emit("preprocess.gpu_crossover_pixels", crossover(rows), "pixels", **notes, is_0="never")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
