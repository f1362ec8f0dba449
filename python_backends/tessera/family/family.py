"""The seam between a model family and everything else: how an image is cut, what it costs, where its rows stand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.family.tile_policy import TilePolicy

KIND_TILES = 0


@dataclass(frozen=True)
class View:
    """The whole picture resized once and cut: uint8 [height, width, 3] -> reshape(split) -> transpose(order)."""

    width: int
    height: int
    split: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class ImagePlan:
    """What becomes of one picture, known from its size alone.

    ``kind`` 0: ``t`` square tiles of ``h`` x ``w`` pixels, the grid of ``columns`` x ``rows`` row by row, then the
    thumbnail if there is one; 1: the same, cut by the vision stage. ``tokens``: rows the vision encoder will give.
    """

    kind: int
    t: int
    h: int
    w: int
    columns: int
    rows: int
    thumbnail: bool
    tokens: int

    @property
    def pixel_shape(self) -> tuple[int, int, int, int]:
        """Shape of the uint8 RGB pixels."""
        return self.t, self.h, self.w, 3

    @property
    def cost(self) -> int:
        """Units of the vision stage's work."""
        return self.t

    @property
    def views(self) -> tuple[View, ...]:
        split = (self.rows, self.h, self.columns, self.w, 3)
        grid = View(self.columns * self.w, self.rows * self.h, split, (0, 2, 1, 3, 4))
        return (grid, View(self.w, self.h, (1, self.h, 1, self.w, 3), (0, 2, 1, 3, 4)))[: 1 + self.thumbnail]

    @property
    def pixel_bytes(self) -> int:
        return 3 * sum(view.width * view.height for view in self.views)

    def wire(self) -> tuple[int, int, int, int]:
        """The four int32 of tensor PLAN: kind, tiles, the grid's rows and columns."""
        return self.kind, self.t, self.rows, self.columns


@dataclass(frozen=True)
class ImageSpan:
    """Where one picture's rows stand in ``input_ids``: ``length`` positions from ``start``."""

    start: int
    length: int


class ModelFamily(ABC):
    """One kind of vision-language model. Stateless apart from its configuration; safe to share."""

    #: the token whose positions image rows take, and its id in the checkpoint's vocabulary if the config names it
    image_token: str
    image_token_id: int | None
    #: every token that ``pieces`` may name
    control_tokens: tuple[str, ...]
    #: special tokens that a user's text may use with their meaning (grounding marks); all others are plain text there
    user_tokens: tuple[str, ...] = ()
    #: what a plan's cost counts, for messages, and the uint8 shape of one such unit
    cost_unit: str
    unit_shape: tuple[int, ...]

    @abstractmethod
    def default_policy(self) -> TilePolicy:
        """The policy that the checkpoint's own files state."""

    @abstractmethod
    def plan(self, width: int, height: int, policy: TilePolicy) -> ImagePlan:
        """Plan for a picture of ``width`` x ``height`` pixels (after EXIF rotation).

        Raises InvalidRequest where the policy's token budget is too small for any plan.
        """

    @abstractmethod
    def plan_of(self, wire: tuple[int, int, int]) -> ImagePlan:
        """The same plan from t, h, w of tensor PLAN. Raises InvalidRequest if it cannot be one."""

    @abstractmethod
    def pieces(self, plan: ImagePlan) -> tuple[tuple[str, int], ...]:
        """(special token, repetitions) that take the place of the prompt's one image token."""

    @abstractmethod
    def positions(self, input_length: int, spans: Sequence[ImageSpan], plans: Sequence[ImagePlan]) -> np.ndarray:
        """Rotary positions, int64 [axes, input_length]."""

    def placeholder(self, plan: ImagePlan) -> str:
        """The text that takes the place of the prompt's one image token."""
        return "".join(token * count for token, count in self.pieces(plan))
