"""TEDS on tables whose distance can be counted by hand."""

from __future__ import annotations

import pytest
from table_similarity import table, teds

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
    rows = table("<fcel>a<lcel><fcel>b<nl><ucel><xcel><fcel>c<nl><fcel>d<ecel><fcel>e<nl>")
    assert [[(columns, high, text) for (_, columns, high, text), _ in cells] for _, cells in rows] == [
        [(2, 2, "a"), (1, 1, "b")],
        [(1, 1, "c")],
        [(1, 1, "d"), (1, 1, ""), (1, 1, "e")],
    ]
