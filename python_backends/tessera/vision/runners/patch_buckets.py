"""Forwards of pictures of any size, filled up to one of few sizes: what recorded graphs of them would need.

What fills up is one more picture, which no other sees and whose rows nobody reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from tessera.vision.towers.tower import Wires

_LEAST = 64


def bucket_sizes(largest: int) -> list[int]:
    """Costs worth a graph, up to ``largest``: each a quarter above the last, so that less than a fifth is filling."""
    sizes = [min(_LEAST, largest)]
    while sizes[-1] < largest:
        sizes.append(min(sizes[-1] * 5 // 4, largest))
    return sizes


def filled_up(wires: Wires, merge: int, sizes: Sequence[int]) -> list[tuple[int, int, int]] | None:
    """The pictures (1, height, width in patches, ``merge`` x ``merge`` to a unit of cost), and what fills them up to
    the next of ``sizes``, in order; None if they cost more than the last."""
    cost = sum(height * width for _, height, width in wires) // merge**2
    place = bisect_left(sizes, cost)
    if place == len(sizes):
        return None
    return [*wires, *[(1, merge, merge * (sizes[place] - cost))] * (sizes[place] > cost)]
