"""Random choices that mean the same on every Python: all are built on `random.Random.random()` alone."""

import math
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """A seeded stream of choices. `key` is any text; equal keys give equal streams."""

    def __init__(self, key: str) -> None:
        self._random = random.Random(key).random

    def uniform(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return low + (high - low) * self._random()

    def log_uniform(self, low: float, high: float) -> float:
        """A number in [low, high) whose logarithm is uniform; `low` > 0."""
        return math.exp(self.uniform(math.log(low), math.log(high)))

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._random() < probability

    def integer(self, count: int) -> int:
        """An integer in 0..count-1."""
        return int(self._random() * count)

    def pick(self, options: Sequence[T], weights: Sequence[float] | None = None) -> T:
        """One of the options, by weight if weights are given."""
        if weights is None:
            return options[self.integer(len(options))]
        left = self._random() * sum(weights)
        for option, weight in zip(options, weights, strict=True):
            left -= weight
            if left < 0:
                return option
        return options[-1]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """The options in a random order."""
        return [option for _, _, option in sorted((self._random(), i, o) for i, o in enumerate(options))]
