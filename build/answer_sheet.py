"""A picture of pictures: each with its question and the server's answer beneath it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

CELL = (420, 315)  # width, height of a picture, pixels
CAPTION = 58
FONT = cv2.FONT_HERSHEY_SIMPLEX
RIGHT, WRONG, INK = (60, 130, 30), (40, 40, 200), (40, 40, 40)  # BGR


def write(path: Path, entries: Sequence[tuple[Path, str, str, bool]], columns: int = 3) -> None:
    """Writes the sheet as JPEG.

    Args:
        path: where to.
        entries: of each picture its file, the question, the answer, and whether the answer is right.
        columns: pictures in a row.
    """
    cells = [_cell(*entry) for entry in entries]
    cells += [np.full_like(cells[0], 255)] * (-len(cells) % columns)
    rows = [np.hstack(cells[i : i + columns]) for i in range(0, len(cells), columns)]
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.vstack(rows), [cv2.IMWRITE_JPEG_QUALITY, 85])


def _cell(file: Path, question: str, answer: str, right: bool) -> np.ndarray:
    picture = cv2.imread(str(file))
    scale = min(CELL[0] / picture.shape[1], CELL[1] / picture.shape[0])
    small = cv2.resize(picture, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    cell = np.full((CELL[1] + CAPTION, CELL[0] + 10, 3), 255, np.uint8)
    left = (CELL[0] - small.shape[1]) // 2 + 5
    cell[: small.shape[0], left : left + small.shape[1]] = small
    size = min(0.42, 0.42 * CELL[0] / cv2.getTextSize(question, FONT, 0.42, 1)[0][0])
    cv2.putText(cell, question, (5, CELL[1] + 18), FONT, size, INK, 1, cv2.LINE_AA)
    cv2.putText(cell, answer, (5, CELL[1] + 42), FONT, 0.6, RIGHT if right else WRONG, 1, cv2.LINE_AA)
    return cell
