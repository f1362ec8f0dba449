"""Grids computed without the implementation.

Exact fractions with rounding to double where the reference computes in double, and a small model of CPython's set for
the original code's order of grids.
"""

from __future__ import annotations

import random
from fractions import Fraction
from functools import lru_cache

ORDERS = ("columns", "set")
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


@lru_cache(maxsize=64)
def reference_order(order: str, least: int, most: int) -> list[tuple[int, int]]:
    if order == "set":
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


def expected_grid(order: str, width: int, height: int, least: int, most: int) -> tuple[int, int]:
    """All nearest grids at once, then the tie rule from the first to the last of them."""
    grids = reference_order(order, least, most)
    aspect = Fraction(float(Fraction(width, height)))
    distance = [float(abs(aspect - Fraction(float(Fraction(*grid))))) for grid in grids]
    tied = [grid for grid, value in zip(grids, distance, strict=True) if value == min(distance)]
    winner = tied[0]
    for grid in tied[1:]:
        if Fraction(width * height, 448 * 448) > Fraction(grid[0] * grid[1], 2):
            winner = grid
    return winner


def expected_native_grid(width: int, height: int, least: int, most: int) -> tuple[int, int]:
    """The rule of ``native`` as it is told: from one tile upwards, the first that fits in shape and in pixels."""

    def stretch(grid: tuple[int, int]) -> Fraction:
        ratio = Fraction(grid[0] * height, grid[1] * width)
        return max(ratio, 1 / ratio)

    def of(tiles: int) -> list[tuple[int, int]]:
        grids = [(columns, tiles // columns) for columns in range(tiles, 0, -1) if tiles % columns == 0]
        return sorted(grids, key=stretch)  # stable: of two alike the wider stays first

    best = {tiles: of(tiles)[0] for tiles in range(least, most + 1)}
    fitting = {tiles: grid for tiles, grid in best.items() if 2 * stretch(grid) <= 3}
    if not fitting:
        nearest = min(map(stretch, best.values()))
        fitting = {tiles: grid for tiles, grid in best.items() if stretch(grid) == nearest}
    for tiles, grid in fitting.items():
        if 4 * tiles * 448**2 >= 3 * width * height:
            return grid
    return fitting[max(fitting)]
