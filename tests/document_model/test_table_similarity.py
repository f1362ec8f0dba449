"""TEDS on tables whose distance can be counted by hand, and beside a search over all ways to edit small ones."""

from __future__ import annotations

from random import Random

import pytest
from table_similarity import _distance, _rows, teds

TABLE = "<fcel>a<fcel>b<nl><fcel>1<fcel>22<nl>"  # two rows of two cells: six nodes


@pytest.mark.parametrize(
    ("got", "distance"),
    [
        (TABLE, 0),
        ("<fcel>a<fcel>b<nl><fcel>1<fcel>23<nl>", 0.5),  # half of a cell's characters
        ("<fcel>a<fcel>b<nl><fcel>1<ecel><nl>", 1),
        ("<fcel>a<fcel>b<nl><fcel>1<nl>", 1),  # a cell is missing
        ("<fcel>a<fcel>b<nl>", 3),  # a row and its cells
        ("<fcel>1<fcel>22<nl>", 3),  # the first one: the second is not taken for it
        ("<fcel>a<lcel><nl><fcel>1<fcel>22<nl>", 2),  # another span, and a cell less
        ("<fcel>a<fcel>b<nl><ucel><fcel>22<nl>", 2),
        ("<fcel>x<fcel>y<nl>" + TABLE, 3 / 9 * 6),  # of nine nodes
        ("", 6),
        ("nothing of a table", 6),
    ],
)
def test_distances_by_hand(got: str, distance: float) -> None:
    assert teds([(TABLE, got)]) == teds([(got, TABLE)]) == pytest.approx(1 - distance / 6)


def test_the_mean_is_over_tables() -> None:
    assert teds([(TABLE, TABLE), (TABLE, "")]) == 0.5
    assert teds([("", "")]) == 1 and teds([]) == 0


def test_spans_are_of_the_cell_that_begins_them() -> None:
    rows = _rows("<fcel>a<lcel><fcel>b<nl><ucel><xcel><fcel>c<nl><fcel>d<ecel><fcel>e<nl>")
    assert [[(columns, high, text) for _, columns, high, text in row] for row in rows] == [
        [(2, 2, "a"), (1, 1, "b")],
        [(1, 1, "c")],
        [(1, 1, "d"), (1, 1, ""), (1, 1, "e")],
    ]


def test_it_is_the_least_of_all_ways_to_edit() -> None:
    """Forests by the definition itself: take away the last node of one, of the other, or match both."""
    dice = Random(5)

    def tree(rows):
        return ("table", tuple(("tr", tuple((cell, ()) for cell in row)) for row in rows))

    def least(a, b) -> float:
        if not a or not b:
            return float(size(a) + size(b))
        (tag, under), (name, below) = a[-1], b[-1]
        return min(
            least((*a[:-1], *under), b) + 1,
            least(a, (*b[:-1], *below)) + 1,
            least(a[:-1], b[:-1]) + least(under, below) + (tag != name),
        )

    def size(forest) -> int:
        return sum(1 + size(under) for _, under in forest)

    for _ in range(40):
        tables = [
            "".join(
                "".join(f"<fcel>{dice.choice('abc')}" for _ in range(dice.randint(1, 3))) + "<nl>"
                for _ in range(dice.randint(1, 2))
            )
            for _ in "ab"
        ]
        one, other = map(_rows, tables)
        assert _distance(one, other) == least((tree(one),), (tree(other),)), tables
