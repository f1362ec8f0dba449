"""The tiling rule against tables computed without the implementation.

Three sources: exact fractions with rounding to double where the reference computes in double, a small model of
CPython's set for the original code's order of grids, and transformers' own function for HF-native checkpoints.
"""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from tessera.family.internvl import best_grid, candidate_grids

LAYOUTS = ("hf_native", "internvl_chat")
MASK = (1 << 64) - 1


def random_sizes(count: int) -> list[tuple[int, int]]:
    """Odd sizes, common sizes and exact multiples of a small aspect, where ties are."""
    dice = random.Random(20240917)
    sizes = []
    while len(sizes) < count:
        kind = len(sizes) % 3
        if kind == 0:
            sizes.append((dice.randint(1, 4000), dice.randint(1, 4000)))
        elif kind == 1:
            scale = dice.randint(8, 700)
            sizes.append((dice.randint(1, 12) * scale, dice.randint(1, 12) * scale))
        else:
            # Halfway between two grids' aspects: ties of different ratios.
            first, second = (Fraction(dice.randint(1, 6), dice.randint(1, 6)) for _ in range(2))
            middle = (first + second) / 2 * dice.randint(1, 60)
            sizes.append((middle.numerator, middle.denominator))
    return sizes


def tuple_hash(columns: int, rows: int) -> int:
    """CPython's hash of a pair of small ints (xxHash64 rounds, Objects/tupleobject.c)."""
    prime1, prime2, prime5 = 11400714785074694791, 14029467366897019727, 2870177450012600261
    value = prime5
    for lane in (columns, rows):
        value = (value + lane * prime2) & MASK
        value = (value << 31 | value >> 33) & MASK
        value = value * prime1 & MASK
    return (value + (2 ^ prime5 ^ 3527539)) & MASK


class SetModel:
    """Open addressing as in Objects/setobject.c: nine linear probes, then a perturbed jump; grows fourfold."""

    def __init__(self) -> None:
        self.slots: list[tuple[int, int] | None] = [None] * 8

    def add(self, item: tuple[int, int]) -> None:
        if self._place(item):
            used = sum(slot is not None for slot in self.slots)
            if used * 5 >= (len(self.slots) - 1) * 3:
                size = 8
                while size <= used * 4:
                    size *= 2
                old, self.slots = self.slots, [None] * size
                for slot in old:
                    if slot is not None:
                        self._place(slot)

    def _place(self, item: tuple[int, int]) -> bool:
        mask = len(self.slots) - 1
        perturb = value = tuple_hash(*item)
        at = value & mask
        while True:
            for probe in range(at, at + (9 if at + 9 <= mask else 0) + 1):
                if self.slots[probe] is None:
                    self.slots[probe] = item
                    return True
                if self.slots[probe] == item:
                    return False
            perturb >>= 5
            at = (at * 5 + 1 + perturb) & mask


def reference_order(layout: str, least: int, most: int) -> list[tuple[int, int]]:
    if layout == "internvl_chat":
        model = SetModel()
        for n in range(least, most + 1):
            for columns in range(1, n + 1):
                for rows in range(1, n + 1):
                    if least <= columns * rows <= most:
                        model.add((columns, rows))
        found = [slot for slot in model.slots if slot is not None]
    else:
        found = []
        for columns in range(1, most + 1):
            found += [(columns, rows) for rows in range(1, most + 1) if least <= columns * rows <= most]
    return sorted(found, key=lambda grid: grid[0] * grid[1])


def expected_grid(layout: str, width: int, height: int, least: int, most: int) -> tuple[int, int]:
    """All nearest grids at once, then the tie rule from the first to the last of them."""
    grids = reference_order(layout, least, most)
    aspect = Fraction(float(Fraction(width, height)))
    distance = [float(abs(aspect - Fraction(float(Fraction(*grid))))) for grid in grids]
    tied = [grid for grid, value in zip(grids, distance, strict=True) if value == min(distance)]
    winner = tied[0]
    for grid in tied[1:]:
        if Fraction(width * height, 448 * 448) > Fraction(grid[0] * grid[1], 2):
            winner = grid
    return winner


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("least", "most"), [(1, 12), (1, 6), (1, 2), (7, 12), (2, 2), (3, 40)])
def test_order_of_candidates(layout: str, least: int, most: int) -> None:
    assert list(candidate_grids(layout, least, most)) == reference_order(layout, least, most)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grids_of_random_sizes(layout: str) -> None:
    ranges = [(1, 12), (1, 12), (1, 6), (1, 2), (7, 12), (2, 9)]
    wrong = []
    for index, (width, height) in enumerate(random_sizes(2400)):
        least, most = ranges[index % len(ranges)]
        found = best_grid(layout, width, height, 448, least, most)
        if found != expected_grid(layout, width, height, least, most):
            wrong.append((width, height, least, most, found))
    assert not wrong


def test_hf_native_grids_are_those_of_transformers() -> None:
    for width, height in random_sizes(2400):
        for least, most in ((1, 12), (2, 7)):
            expected = get_optimal_tiled_canvas((height, width), (448, 448), least, most)
            assert best_grid("hf_native", width, height, 448, least, most) == expected


def test_the_two_orders_differ_somewhere() -> None:
    """Else the tests above could not tell the layouts apart. 5:4 lies halfway between one and two tiles a row."""
    ranges = [(least, most) for least in range(1, 13) for most in range(least, 13)]
    orders = {layout: [candidate_grids(layout, *bounds) for bounds in ranges] for layout in LAYOUTS}
    assert orders["hf_native"] != orders["internvl_chat"]
    middles = {
        Fraction(a[0] * b[1] + b[0] * a[1], 2 * a[1] * b[1])
        for a in candidate_grids("hf_native", 1, 12)
        for b in candidate_grids("hf_native", 1, 12)
    }
    differing = [
        (middle, bounds)
        for middle in middles
        for bounds in ranges
        for size in [(middle.numerator * 64, middle.denominator * 64)]
        if best_grid("hf_native", *size, 448, *bounds) != best_grid("internvl_chat", *size, 448, *bounds)
    ]
    assert differing
