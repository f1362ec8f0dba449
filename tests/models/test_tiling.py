"""The tiling rule against tables computed without the implementation (grid_oracle.py), and against transformers' own
function for HF-native checkpoints."""

from __future__ import annotations

from fractions import Fraction

import pytest
from grid_oracle import ORDERS, expected_grid, random_sizes, reference_order
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from tessera.models.internvl.processor import best_grid, candidate_grids


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("least", "most"), [(1, 12), (1, 6), (1, 2), (7, 12), (2, 2), (3, 40)])
def test_order_of_candidates(order: str, least: int, most: int) -> None:
    assert list(candidate_grids(order, least, most)) == reference_order(order, least, most)


@pytest.mark.parametrize("order", ORDERS)
def test_grids_of_random_sizes(order: str) -> None:
    ranges = [(1, 12), (1, 12), (1, 6), (1, 2), (7, 12), (2, 9)]
    wrong = []
    for index, (width, height) in enumerate(random_sizes(2400)):
        least, most = ranges[index % len(ranges)]
        found = best_grid(order, width, height, 448, least, most)
        if found != expected_grid(order, width, height, least, most):
            wrong.append((width, height, least, most, found))
    assert not wrong


def test_hf_native_grids_are_those_of_transformers() -> None:
    for width, height in random_sizes(2400):
        for least, most in ((1, 12), (2, 7)):
            expected = get_optimal_tiled_canvas((height, width), (448, 448), least, most)
            assert best_grid("columns", width, height, 448, least, most) == expected


def test_the_two_orders_differ_somewhere() -> None:
    """Else the tests above could not tell the layouts apart. 5:4 lies halfway between one and two tiles a row."""
    ranges = [(least, most) for least in range(1, 13) for most in range(least, 13)]
    orders = {order: [candidate_grids(order, *bounds) for bounds in ranges] for order in ORDERS}
    assert orders["columns"] != orders["set"]
    middles = {
        Fraction(a[0] * b[1] + b[0] * a[1], 2 * a[1] * b[1])
        for a in candidate_grids("columns", 1, 12)
        for b in candidate_grids("columns", 1, 12)
    }
    differing = [
        (middle, bounds)
        for middle in middles
        for bounds in ranges
        for size in [(middle.numerator * 64, middle.denominator * 64)]
        if best_grid("columns", *size, 448, *bounds) != best_grid("set", *size, 448, *bounds)
    ]
    assert differing
