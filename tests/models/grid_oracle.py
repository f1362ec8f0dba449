"""Grids computed without the implementation."""

import random
from fractions import Fraction
from functools import lru_cache


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


@lru_cache(maxsize=64)
def reference_order(least: int, most: int) -> list[tuple[int, int]]:
    """Grids as OpenGVLab's code enumerates them, in a set; transformers' list is tested against transformers."""
    grids = {
        (columns, rows)
        for n in range(least, most + 1)
        for columns in range(1, n + 1)
        for rows in range(1, n + 1)
        if least <= columns * rows <= most
    }
    return sorted(grids, key=lambda grid: grid[0] * grid[1])


def expected_grid(width: int, height: int, least: int, most: int) -> tuple[int, int]:
    """All nearest grids at once, then the tie rule from the first to the last of them."""
    grids = reference_order(least, most)
    distance = [abs(width / height - columns / rows) for columns, rows in grids]
    first, *tied = [grid for grid, value in zip(grids, distance, strict=True) if value == min(distance)]
    larger = [grid for grid in tied if Fraction(width * height, 448 * 448) > Fraction(grid[0] * grid[1], 2)]
    return [first, *larger][-1]


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
