"""Scores of answers: characters, boxes, cells."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

_BLOCK = re.compile(
    r"<\|box_start\|>(\d+)\s+(\d+)\s+(\d+)\s+(\d+)<\|box_end\|><\|ref_start\|>(\w+?)<\|ref_end\|>", re.DOTALL
)
Found = tuple[str, tuple[int, int, int, int]]


def edits(expected: str, got: str) -> int:
    """Characters to insert, delete or replace to make one of the other."""
    a, b = np.array(list(map(ord, expected))), np.array(list(map(ord, got)))
    row = np.arange(len(b) + 1)
    for index, character in enumerate(a):
        best = np.minimum(row[1:] + 1, row[:-1] + (b != character))
        # An insertion continues what stands to the left: a running minimum once the places are taken off.
        line = np.concatenate(([index + 1], best)) - np.arange(len(b) + 1)
        row = np.minimum.accumulate(line) + np.arange(len(b) + 1)
    return int(row[-1])


def cer(pairs: Sequence[tuple[str, str]]) -> float:
    """Edits over expected characters, of (expected, got); an answer counts at most as wrong throughout."""
    wrong = sum(min(edits(expected, got), max(1, len(expected))) for expected, got in pairs)
    return wrong / max(1, sum(len(expected) for expected, _ in pairs))


def blocks(answer: str) -> list[Found]:
    """(kind, box in thousandths) of each well-formed block of a layout answer."""
    return [
        (kind, (int(x0), int(y0), int(x1), int(y1)))
        for x0, y0, x1, y1, kind in _BLOCK.findall(answer)
        if int(x0) < int(x1) <= 1000 and int(y0) < int(y1) <= 1000
    ]


def overlap(a: Sequence[int], b: Sequence[int]) -> float:
    """Intersection over union."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0, width) * max(0, height)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def matches(expected: Sequence[Found], got: Sequence[Found], least: float = 0.5) -> list[tuple[int, int]]:
    """Pairs (place in expected, place in got) of one kind, the best overlaps first, each block once."""
    pairs = sorted(
        (
            (overlap(box, other), i, j)
            for i, (kind, box) in enumerate(expected)
            for j, (name, other) in enumerate(got)
            if kind == name
        ),
        reverse=True,
    )
    taken: list[tuple[int, int]] = []
    for value, i, j in pairs:
        if value >= least and all(i != a and j != b for a, b in taken):
            taken.append((i, j))
    return taken


def layout_f1(pairs: Sequence[tuple[str, str]]) -> float:
    """F1 of blocks of the right kind at an overlap of 0.5, over pages of (expected, got)."""
    hits = total = 0
    for expected, got in pairs:
        a, b = blocks(expected), blocks(got)
        hits += len(matches(a, b))
        total += len(a) + len(b)
    return 2 * hits / max(1, total)


def cells(otsl: str) -> Counter[tuple[int, int, str, str]]:
    """(row, column, what it is, text) of each cell."""
    found: Counter[tuple[int, int, str, str]] = Counter()
    for row, line in enumerate(otsl.split("<nl>")):
        for column, (mark, text) in enumerate(re.findall(r"<([a-z]cel)>([^<]*)", line)):
            found[row, column, mark, text.strip()] += 1
    return found


def cell_f1(pairs: Sequence[tuple[str, str]]) -> float:
    """F1 of cells that stand in their place with their whole text, over tables of (expected, got)."""
    hits = total = 0
    for expected, got in pairs:
        a, b = cells(expected), cells(got)
        hits += (a & b).total()
        total += a.total() + b.total()
    return 2 * hits / max(1, total)
