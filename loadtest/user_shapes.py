"""How many users there are when: the shapes that locustfile.py offers."""

from __future__ import annotations

SECONDS: dict[str, float | None] = {"steady": None, "ramp": 120.0, "spike": 120.0, "soak": 1800.0, "mix": None}
"""By its shape, how long a run lasts that is not told; None: until it is stopped."""
SPIKE = (0.4, 0.6)
QUIET = 0.25


def users_at(shape: str, share: float, most: int) -> int:
    """Users when this share of the run has passed (0 to 1), of at most this many.

    steady: all of them; soak and mix too, which differ by how long they last and by what is asked. ramp: one after
    another, all of them in the last fifth. spike: a quarter, and all of them in the middle fifth.
    """
    if shape == "ramp":
        return max(1, min(most, round(most * share / 0.8)))
    if shape == "spike" and not SPIKE[0] <= share < SPIKE[1]:
        return max(1, round(most * QUIET))
    return most
