"""Compare a plan's rows with torch's.

    python build/tensorrt85/judge.py DIR ROWS [FIRST]

DIR is graph85.py's; ROWS the file that `trtprobe run` wrote for DIR's tiles, again and again from tile FIRST on.
Prints the least cosine over all rows; exit code 1 below 0.99 or with anything not finite.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

LEAST = 0.99
SAMPLES = 6  # the tiles of graph85.py


def least_cosine(rows: np.ndarray, wanted: np.ndarray, first: int = 0) -> tuple[float, list[float]]:
    """Of [n, rows, hidden] against the reference [6, rows, hidden] repeated; over all, and of each of the samples."""
    wanted = wanted.reshape(SAMPLES, -1, wanted.shape[-1]).astype(np.float64)
    order = (np.arange(len(rows)) + first) % SAMPLES
    a, b = rows.reshape(len(rows), -1, wanted.shape[-1]).astype(np.float64), wanted[order]
    cosine = (a * b).sum(-1) / np.maximum(np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1), 1e-300)
    by_tile = cosine.min(1)
    return float(by_tile.min()), [float(by_tile[order == k].min()) for k in range(SAMPLES) if (order == k).any()]


def main() -> int:
    folder, file = Path(sys.argv[1]), Path(sys.argv[2])
    wanted = np.load(folder / "rows.npy")
    rows = np.fromfile(file, np.float16).reshape(-1, wanted.size // SAMPLES // wanted.shape[-1], wanted.shape[-1])
    finite = bool(np.isfinite(rows).all())
    least, by_tile = least_cosine(rows, wanted, int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    names = ("black", "white", "noise", "smooth", "smooth", "smooth")
    each = ", ".join(f"{name} {cosine:.6f}" for name, cosine in zip(names, by_tile, strict=False))
    print(f"COSINE {file.name}: {least:.7f} at least over {len(rows)} tiles ({each}); finite: {finite}")
    return 0 if finite and least >= LEAST else 1


if __name__ == "__main__":
    raise SystemExit(main())
