"""Qwen2-VL: pictures near their own size, patches in groups that become one row each, positions of three axes.

Rules: transformers ``image_processing_pil_qwen2_vl.py``, which resizes as Pillow does, and ``modeling_qwen2_vl.py``.
The torchvision processor differs from it by the rounding of its resize alone. Where a processor repeats a still picture
to fill a patch's frames, the tower sums its kernel over them, so that a picture travels once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import numpy as np

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.files import read_token_names
from tessera.errors import InvalidRequest
from tessera.models.family import ImagePlan, ModelFamily, View, units_of
from tessera.models.qwen2_vl.config import PixelRange
from tessera.models.tile_policy import stated_keys

MOST_ASPECT = 200
MOST_PIXELS = 2**31 - 1
LOW_PIXELS = 512 * 512  # of a picture in low detail, as OpenAI has it
BOUNDS = ("min_pixels", "max_pixels")
PRUNE = get_args(get_type_hints(PixelRange)["prune"])


def smart_resize(width: int, height: int, factor: int, limits: PixelRange) -> tuple[int, int]:
    """(width, height) in multiples of ``factor``, near the picture's aspect and its own size if ``limits`` allow it.

    As the reference, sides are rounded half to even, and a very long picture may stay above ``max_pixels``. Raises
    InvalidRequest where one side is more than 200 times the other.
    """
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise InvalidRequest(
            f"{width}x{height} pixels are more than {MOST_ASPECT} times as long as they are wide; cut the picture"
        )
    across, down = (round(side / factor) * factor for side in (width, height))
    if across * down > limits.max_pixels:
        shrink = math.sqrt((height * width) / limits.max_pixels)
        across, down = (max(factor, math.floor(side / shrink / factor) * factor) for side in (width, height))
    elif across * down < limits.min_pixels:
        grow = math.sqrt(limits.min_pixels / (height * width))
        across, down = (math.ceil(side * grow / factor) * factor for side in (width, height))
    return across, down


class Qwen2VL(ModelFamily):
    """Of any size. ``wire`` is (1, rows, columns) of patches: transformers' image_grid_thw; a video would have more
    frames than 1. A unit of cost is a group of patches, all patches of the group next to each other."""

    user_tokens: tuple[str, ...] = (
        *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>"),
        "<|quad_end|>",
    )
    #: around a picture's rows, and in their place, where the tokenizer's file names no other
    default_tokens = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    cost_unit = "image tokens"
    policy_keys = ("tile_policy", "min_pixels", "max_pixels")
    reduce_hint = "lower max_pixels"

    def __init__(self, config: CheckpointConfig) -> None:
        self.patch, self.merge = config.vision.patch_size, config.vision.spatial_merge_size
        self.unit_shape = (self.merge, self.merge, self.patch, self.patch, 3)
        self.max_cost = config.text.max_position_embeddings
        self.image_token_id = config.image_token_id
        begin, default, end = self.default_tokens
        self.image_token = read_token_names(config.folder).get("image_token", default)
        self.control_tokens = (begin, self.image_token, end)
        self._checkpoint_range: PixelRange = config.pictures

    @property
    def marker_text(self) -> str:
        return "".join(self.control_tokens)

    def policy(
        self, asked: Mapping[str, Any], default: PixelRange | None = None, max_cost: int | None = None
    ) -> PixelRange:
        super().policy(asked)
        stated = {name: asked[name] for name in BOUNDS if asked.get(name) is not None}
        if asked.get("tile_policy") is not None:
            stated = stated_keys(asked["tile_policy"]) | stated
        for name, value in stated.items():
            if name == "prune":
                if value not in PRUNE:
                    raise InvalidRequest(f"tile policy: prune must be one of {PRUNE}, not {value!r:.50}")
            elif name not in BOUNDS:
                known = ", ".join((*BOUNDS, "prune"))
                raise InvalidRequest(f"tile policy: unknown key {name!r:.50}; this model's are {known}")
            elif type(value) is not int or not 1 <= value <= MOST_PIXELS:
                raise InvalidRequest(f"{name} must be a whole number from 1 to {MOST_PIXELS}, not {value!r:.50}")
        limits = replace(default or self._checkpoint_range, **stated)
        if limits.min_pixels > limits.max_pixels:
            raise InvalidRequest(
                f"min_pixels {limits.min_pixels} is above max_pixels {limits.max_pixels}; state both, the first not "
                "above the second"
            )
        tokens = self.largest_picture(limits)
        if "max_pixels" in stated and max_cost is not None and tokens > max_cost:
            raise InvalidRequest(
                f"max_pixels {limits.max_pixels} makes up to {tokens} {self.cost_unit} of a picture; this server's "
                f"limit is {max_cost} a request"
            )
        return limits

    def low_detail(self, policy: PixelRange) -> PixelRange:
        return replace(policy, **{name: min(getattr(policy, name), LOW_PIXELS) for name in BOUNDS})

    def plan(self, width: int, height: int, policy: PixelRange) -> ImagePlan:
        across, down = smart_resize(width, height, self.merge * self.patch, policy)
        return self.plan_of((1, down // self.patch, across // self.patch))

    def largest_picture(self, policy: PixelRange) -> int:
        return policy.max_pixels // (self.merge * self.patch) ** 2

    def plan_of(self, wire: tuple[int, int, int]) -> ImagePlan:
        frames, rows, columns = wire
        if frames != 1:
            raise InvalidRequest(f"{frames} frames: video is not supported; send pictures")
        down, across = rows // self.merge, columns // self.merge
        if down < 1 or across < 1 or (rows, columns) != (down * self.merge, across * self.merge):
            raise InvalidRequest(f"{rows}x{columns} patches are no grid of groups of {self.merge}x{self.merge}")
        split = (down, self.merge, self.patch, across, self.merge, self.patch, 3)
        view = View(columns * self.patch, rows * self.patch, split, (0, 3, 1, 4, 2, 5, 6))
        return ImagePlan(down * across, down * across, wire, (view,))

    def prunes(self, policy: PixelRange) -> bool:
        return policy.prune == "equal"

    def distinct(self, units: np.ndarray) -> np.ndarray:
        """Of equal groups of patches the first, in reading order: equal byte for byte."""
        _, first = np.unique(units.view(f"V{units.shape[1]}"), return_index=True)
        kept = np.zeros(len(units), bool)
        kept[first] = True
        return kept

    def without(self, plan: ImagePlan, kept: bytes) -> ImagePlan:
        units = units_of(kept, plan.cost)
        if not units.any() or np.packbits(units).tobytes() != kept:
            raise InvalidRequest(f"of {plan.cost} groups of patches {len(kept)} bytes do not say which are kept")
        left = int(units.sum())
        return replace(plan, tokens=left, cost=left, kept=kept)

    def placeholder_tokens(self, plan: ImagePlan) -> tuple[tuple[str, int], ...]:
        return ((self.image_token, plan.tokens),)

    def positions(self, input_length: int, spans: np.ndarray, plans: Sequence[ImagePlan]) -> np.ndarray:
        """A row's are (base, base + its row, base + its column) in its picture; text goes on above the highest."""
        positions = np.empty((3, input_length), np.int32)
        above, done = 0, 0
        for (start, length), plan in zip(spans.tolist(), plans, strict=True):
            positions[:, done:start] = np.arange(above, above + start - done)
            above += start - done
            rows, columns = (side // self.merge for side in plan.wire[1:])
            places = np.indices((1, rows, columns)).reshape(3, -1)
            if plan.kept is not None:
                places = places[:, units_of(plan.kept, rows * columns)]
            positions[:, start : start + length] = above + places
            above, done = above + max(rows, columns), start + length
        positions[:, done:] = np.arange(above, above + input_length - done)
        return positions
