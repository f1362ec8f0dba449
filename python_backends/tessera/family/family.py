"""The seam between a model family and everything else: how a picture is cut, what it costs, where its rows stand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.errors import InvalidRequest

#: (picture uint8 [H, W, 3], width, height) -> uint8 [height, width, 3]
Resize = Callable[[np.ndarray, int, int], np.ndarray]


@dataclass(frozen=True)
class View:
    """The whole picture resized once and cut: uint8 [height, width, 3], reshaped to ``split``, its axes in ``order``,
    flattened.

    ``split`` is (rows of units, what makes up a unit's height, columns of units, as much for its width, 3).
    """

    width: int
    height: int
    split: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of units of cost."""
        return self.split[0], self.split[len(self.split) // 2]


@dataclass(frozen=True)
class ImagePlan:
    """What becomes of one picture, known from its size alone; opaque outside of its family.

    ``tokens``: the rows that the vision encoder gives. ``cost``: units of the vision stage's work, such as tiles; all
    have as many bytes. ``wire``: what tensor PLAN says of the picture behind its kind. ``views``: its pixels, one after
    the other.
    """

    tokens: int
    cost: int
    wire: tuple[int, int, int]
    views: tuple[View, ...]

    @property
    def pixel_bytes(self) -> int:
        return 3 * sum(view.width * view.height for view in self.views)


class ModelFamily(ABC):
    """One kind of vision-language model. Stateless apart from its configuration; safe to share."""

    #: the token whose positions image rows take, and its id in the checkpoint's vocabulary if the config names it
    image_token: str
    image_token_id: int | None
    #: every token that ``pieces`` may name
    control_tokens: tuple[str, ...]
    #: special tokens that a user's text may use with their meaning (grounding marks); all others are plain text there
    user_tokens: tuple[str, ...] = ()
    #: what cost counts, for messages, and the uint8 shape of one such unit
    cost_unit: str
    unit_shape: tuple[int, ...]
    #: the most that one request may cost where the deployment sets no limit
    max_cost: int
    #: which of ``sampling.POLICY_KEYS`` say how finely its pictures are cut
    policy_keys: tuple[str, ...] = ()
    #: the names that ``tile_policy`` may have
    policy_names: tuple[str, ...] = ()
    #: how a client has less made of its pictures, for messages
    for_less: str = "send smaller pictures"

    def policy(self, asked: Mapping[str, Any], default: Any = None, max_cost: int | None = None) -> Any:
        """What a deployment or a request ``asked`` for, by POLICY_KEYS (None: nothing), parsed for ``plan``.

        ``default`` (None: the checkpoint's own) stands for what it leaves open. Raises InvalidRequest, also where
        ``asked`` allows a picture to cost more than ``max_cost``.
        """
        for name, value in asked.items():
            if value is not None and name not in self.policy_keys:
                known = ", ".join(self.policy_keys) or "none"
                raise InvalidRequest(f"{name} means nothing to this model (what does: {known}); leave it out")
        return default

    @abstractmethod
    def low_detail(self, policy: Any) -> Any:
        """The policy for a picture of which the least detail is enough; ``policy`` is that of the others."""

    @property
    def marker_text(self) -> str:
        """What an ``<image>`` marker in a text becomes: the image token, with what chat templates put around it."""
        return self.image_token

    @abstractmethod
    def plan(self, width: int, height: int, policy: Any) -> ImagePlan:
        """Plan for a picture of ``width`` x ``height`` pixels (after EXIF rotation).

        Raises InvalidRequest where the picture, or the policy, allows no plan.
        """

    def largest_picture(self, policy: Any) -> int:
        """What one picture may cost by ``policy``, if its tower takes it whole; 0 if it may be divided."""
        return 0

    @abstractmethod
    def plan_of(self, wire: tuple[int, int, int]) -> ImagePlan:
        """The plan whose wire form this is. Raises InvalidRequest where there is none."""

    @abstractmethod
    def pieces(self, plan: ImagePlan) -> tuple[tuple[str, int], ...]:
        """(special token, repetitions) that take the place of the prompt's one image token."""

    def positions(self, input_length: int, spans: np.ndarray, plans: Sequence[ImagePlan]) -> np.ndarray | None:
        """Rotary positions of the prompt, int32 [axes, input_length]; None: 0 to input_length - 1, of one axis.

        ``spans`` int32 [k, 2]: (start, length) of each picture's rows. The answer goes on at the highest position + 1.
        """
        return None

    def cut(self, picture: np.ndarray, plan: ImagePlan, resize: Resize, out: np.ndarray) -> None:
        """Fill ``out``, uint8 [plan.pixel_bytes], with the views of ``picture``, uint8 [H, W, 3], upright."""
        start = 0
        for view in plan.views:
            pixels = resize(picture, view.width, view.height).reshape(view.split).transpose(view.order)
            out[start : start + pixels.size].reshape(pixels.shape)[:] = pixels
            start += pixels.size
