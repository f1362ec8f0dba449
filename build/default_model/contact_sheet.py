"""A grid of labelled pictures, to look at what the model is trained on.

python build/default_model/contact_sheet.py --seed 0 --out sheet.png
"""

from __future__ import annotations

import argparse

import cv2
import numpy as np

from scene import HAZARDS, boxes, encode_jpeg, questions, sample

CELL = 480


def cell(seed: int, split: str, labels: bool) -> np.ndarray:
    """One picture, fitted to a square, with its boxes and a presence question; uint8 BGR [480, 480, 3]."""
    scene = sample(seed, split)
    picture = cv2.imdecode(np.frombuffer(encode_jpeg(scene), np.uint8), cv2.IMREAD_COLOR)
    scale = min(CELL / scene.width, (CELL - 40) / scene.height)
    size = (round(scene.width * scale), round(scene.height * scale))
    small = cv2.resize(picture, size, interpolation=cv2.INTER_AREA)
    if labels:
        for name, *box in boxes(scene):
            x0, y0, x1, y1 = (round(b * scale) for b in box)
            colour = (0, 0, 255) if name in HAZARDS else (0, 160, 0)
            cv2.rectangle(small, (x0, y0), (x1, y1), colour, 1)
            cv2.putText(small, name, (x0, max(y0 - 2, 8)), cv2.FONT_HERSHEY_PLAIN, 0.7, colour, 1, cv2.LINE_AA)
    out = np.full((CELL, CELL, 3), 255, np.uint8)
    out[: size[1], : size[0]] = small
    asked = questions(scene)
    question = asked[seed % len(asked)]
    for i, text in enumerate((f"{seed}: {scene.width}x{scene.height}", f"{question.text} {question.answer}")):
        cv2.putText(out, text[:80], (2, CELL - 22 + 16 * i), cv2.FONT_HERSHEY_PLAIN, 0.8, (0, 0, 0), 1, cv2.LINE_AA)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first scene's seed")
    parser.add_argument("--split", choices=("train", "heldout"), default="train")
    parser.add_argument("--columns", type=int, default=4)
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--no-labels", action="store_true", help="draw no boxes")
    parser.add_argument("--out", required=True, help="the PNG file to write")
    given = parser.parse_args()
    cv2.setNumThreads(1)
    cells = [cell(given.seed + i, given.split, not given.no_labels) for i in range(given.columns * given.rows)]
    rows = [np.hstack(cells[i : i + given.columns]) for i in range(0, len(cells), given.columns)]
    cv2.imwrite(given.out, np.vstack(rows))


if __name__ == "__main__":
    main()
