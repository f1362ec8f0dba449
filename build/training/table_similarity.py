"""TEDS of tables: tree-edit-distance similarity, as it was defined with PubTabNet (arXiv:1911.10683).

A table is a tree of rows of cells. The distance is the least number of rows and cells to delete, insert or exchange to
make one of the other; exchanging a cell costs the share of its characters that differ, or 1 where its spans do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import takewhile

from document_scores import edits

Node = tuple[str, int, int, str]
"""Tag (table, tr, td), columns and rows that it spans, text."""


def teds(pairs: Sequence[tuple[str, str]]) -> float:
    """Mean over tables of (expected, got) in OTSL: 1 - distance / nodes of the larger one, the table itself aside."""
    scores = []
    for expected, got in pairs:
        a, b = _rows(expected), _rows(got)
        most = max(sum(1 + len(row) for row in rows) for rows in (a, b))
        scores.append(1 - _distance(a, b) / most if most else 1.0)
    return sum(scores) / max(1, len(scores))


def _rows(otsl: str) -> list[list[Node]]:
    """The cells of each row; one that goes on to the right or below says so by its spans."""
    grid = [marks for line in otsl.split("<nl>") if (marks := re.findall(r"<([a-z]cel)>([^<]*)", line))]

    def follow(marks: Sequence[str], mark: str) -> int:
        return 1 + len(list(takewhile(lambda found: found == mark, marks)))

    return [
        [
            (
                "td",
                follow([mark for mark, _ in line[column + 1 :]], "lcel"),
                follow([below[column][0] if column < len(below) else "" for below in grid[row + 1 :]], "ucel"),
                text.strip(),
            )
            for column, (mark, text) in enumerate(line)
            if mark not in ("lcel", "ucel", "xcel")
        ]
        for row, line in enumerate(grid)
    ]


def _postorder(rows: Sequence[Sequence[Node]]) -> tuple[list[Node], list[int]]:
    """The tree's nodes, children first, and for each the place of its leftmost leaf."""
    nodes: list[Node] = []
    leftmost: list[int] = []
    for row in rows:
        first = len(nodes)
        leftmost += [*range(first, first + len(row)), first]
        nodes += [*row, ("tr", 1, 1, "")]
    return [*nodes, ("table", 1, 1, "")], [*leftmost, 0]


@cache
def _exchange(a: Node, b: Node) -> float:
    if a[:3] != b[:3]:
        return 1.0
    return edits(a[3], b[3]) / max(len(a[3]), len(b[3])) if a[3] != b[3] else 0.0


def _distance(one: Sequence[Sequence[Node]], other: Sequence[Sequence[Node]]) -> float:
    """Zhang and Shasha's: forests of ever larger subtrees, those that share their leftmost leaf at once."""
    (a, left_a), (b, left_b) = _postorder(one), _postorder(other)
    trees = [[0.0] * len(b) for _ in a]
    for i in _keyroots(left_a):
        for j in _keyroots(left_b):
            from_a, from_b = left_a[i], left_b[j]
            # forest[x][y]: between the first x nodes from from_a on and the first y from from_b on
            forest = [
                [float(x + y) if not x or not y else 0.0 for y in range(j - from_b + 2)] for x in range(i - from_a + 2)
            ]
            for x in range(from_a, i + 1):
                above, row = forest[x - from_a], forest[x - from_a + 1]
                for y in range(from_b, j + 1):
                    at = y - from_b
                    whole = left_a[x] == from_a and left_b[y] == from_b
                    if whole:
                        kept = above[at] + _exchange(a[x], b[y])
                    else:
                        kept = forest[left_a[x] - from_a][left_b[y] - from_b] + trees[x][y]
                    row[at + 1] = min(above[at + 1] + 1, row[at] + 1, kept)
                    if whole:
                        trees[x][y] = row[at + 1]
    return trees[-1][-1]


def _keyroots(leftmost: Sequence[int]) -> list[int]:
    """The last node of each leftmost leaf, in order."""
    return sorted({leaf: place for place, leaf in enumerate(leftmost)}.values())
