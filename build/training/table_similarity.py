"""TEDS of tables: tree-edit-distance similarity, as it was defined with PubTabNet (arXiv:1911.10683).

A table is a tree of rows of cells. The distance is the least number of rows and cells to delete, insert or exchange to
make one of the other; exchanging a cell costs the share of its characters that differ, or 1 where its spans do.
"""

import re
import sys
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from typing import Any

from document_scores import edits

Node = tuple[str, int, int, str]
"""Tag (table, tr, td), columns and rows that it spans, text."""
Forest = tuple[tuple[Node, Any], ...]
"""Trees beside each other: each a node and the forest under it."""


def teds(pairs: Sequence[tuple[str, str]]) -> float:
    """Mean over tables of (expected, got) in OTSL: 1 - distance / nodes of the larger one, the table itself aside."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 20_000))  # a level for each cell of both
    try:
        return sum(_score(table(expected), table(got)) for expected, got in pairs) / max(1, len(pairs))
    finally:
        sys.setrecursionlimit(limit)


def _score(a: Forest, b: Forest) -> float:
    _distance.cache_clear()
    most = max(_size(a), _size(b))
    return 1 - _distance(a, b) / most if most else 1.0


def table(otsl: str) -> Forest:
    """Its rows, with their cells under them; one that goes on to the right or below says so by its spans."""
    grid = [marks for line in otsl.split("<nl>") if (marks := re.findall(r"<([a-z]cel)>([^<]*)", line))]

    def follow(marks: Sequence[str], mark: str) -> int:
        return 1 + len(list(takewhile(lambda found: found == mark, marks)))

    rows = []
    for row, line in enumerate(grid):
        cells = []
        for column, (mark, text) in enumerate(line):
            if mark not in ("lcel", "ucel", "xcel"):
                across = follow([mark for mark, _ in line[column + 1 :]], "lcel")
                down = follow([below[column][0] if column < len(below) else "" for below in grid[row + 1 :]], "ucel")
                cells.append((("td", across, down, text.strip()), ()))
        rows.append((("tr", 1, 1, ""), tuple(cells)))
    return tuple(rows)


def _size(forest: Forest) -> int:
    return sum(1 + _size(under) for _, under in forest)


@cache
def _exchange(a: Node, b: Node) -> float:
    if a[:3] != b[:3]:
        return 1.0
    return edits(a[3], b[3]) / max(len(a[3]), len(b[3])) if a[3] != b[3] else 0.0


@cache
def _distance(a: Forest, b: Forest) -> float:
    """By its definition: the last root of one or the other goes, and what is under it takes its place; or the one
    becomes the other."""
    if not a or not b:
        return float(_size(a) + _size(b))
    (node, under), (other, below) = a[-1], b[-1]
    return min(
        _distance((*a[:-1], *under), b) + 1,
        _distance(a, (*b[:-1], *below)) + 1,
        _distance(a[:-1], b[:-1]) + _distance(under, below) + _exchange(node, other),
    )
