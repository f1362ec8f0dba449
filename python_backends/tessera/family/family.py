"""The seam between a model family and everything else: how an image is cut, what it costs, where its rows stand."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tessera.errors import InvalidRequest

KIND_TILES = 0
THUMBNAIL_RULES = ("auto", "never", "always")


@dataclass(frozen=True)
class TilePolicy:
    """How many tiles a picture may become.

    ``thumbnail``: "auto" appends the whole picture as a last tile when the grid has more than one tile,
    "always" also for a one-tile grid, "never" not at all. ``min_tiles`` and ``max_tiles`` bound the grid alone.
    """

    name: str = "reference"
    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: str = "auto"

    def __post_init__(self) -> None:
        for key in ("min_tiles", "max_tiles"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequest(f"tile policy: {key} must be a whole number of at least 1, not {value!r:.50}")
        if self.min_tiles > self.max_tiles:
            raise InvalidRequest(
                f"tile policy: min_tiles {self.min_tiles!r:.20} is above max_tiles {self.max_tiles!r:.20}; "
                "raise max_tiles"
            )
        if self.thumbnail not in THUMBNAIL_RULES:
            raise InvalidRequest(f"tile policy: thumbnail must be one of {THUMBNAIL_RULES}, not {self.thumbnail!r:.50}")

    @staticmethod
    def parse(value: TilePolicy | Mapping[str, Any] | str | None, default: TilePolicy) -> TilePolicy:
        """A request's policy: a preset's name, JSON text or a mapping whose keys override a preset.

        Without ``name`` the keys override ``default`` (the deployment's policy). Raises InvalidRequest.
        """
        if value is None or isinstance(value, TilePolicy):
            return value or default
        if isinstance(value, str):
            value = _policy_mapping(value)
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"tile policy must be a name or an object, not {type(value).__name__}")
        keys = dict(value)
        name = keys.pop("name", None)
        if name is None or name == default.name:
            base = default
        elif isinstance(name, str) and name in TILE_POLICIES:
            base = TILE_POLICIES[name]
        else:
            raise InvalidRequest(f"tile policy name {name!r:.50} is unknown; known are {sorted(TILE_POLICIES)}")
        unknown = sorted(str(key) for key in keys if key not in ("min_tiles", "max_tiles", "thumbnail"))
        if unknown:
            raise InvalidRequest(
                f"tile policy: unknown key {unknown[0]!r:.50}; known are name, min_tiles, max_tiles, thumbnail"
            )
        return replace(base, **keys)


def _policy_mapping(text: str) -> Any:
    if not text.lstrip().startswith("{"):
        return {"name": text.strip()}
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidRequest("tile policy is JSON nested too deep") from None
    except ValueError as error:
        raise InvalidRequest(f"tile policy is not valid JSON: {error}") from None


# "dense" and "two-tile" reach the two token counts known for a 480x320 picture at 256 tokens a tile: 3328 = 4x3
# tiles and a thumbnail, 512 = two tiles and none. "reference" gives 1792 for it.
TILE_POLICIES = {
    policy.name: policy
    for policy in (
        TilePolicy("reference", 1, 12, "auto"),
        TilePolicy("dense", 7, 12, "auto"),
        TilePolicy("two-tile", 2, 2, "never"),
    )
}


@dataclass(frozen=True)
class ImagePlan:
    """What becomes of one picture, known from its size alone.

    ``kind`` 0: ``t`` square tiles of ``h`` x ``w`` pixels, the grid of ``columns`` x ``rows`` row by row, then the
    thumbnail if there is one. ``tokens``: rows the vision encoder will give.
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

    def wire(self) -> tuple[int, int, int, int]:
        """The four int32 of tensor PLAN."""
        return self.kind, self.t, self.h, self.w


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

    @abstractmethod
    def default_policy(self) -> TilePolicy:
        """The policy that the checkpoint's own files state."""

    @abstractmethod
    def plan(self, width: int, height: int, policy: TilePolicy) -> ImagePlan:
        """Plan for a picture of ``width`` x ``height`` pixels (after EXIF rotation)."""

    @abstractmethod
    def pieces(self, plan: ImagePlan) -> tuple[tuple[str, int], ...]:
        """(special token, repetitions) that take the place of the prompt's one image token."""

    @abstractmethod
    def positions(self, input_length: int, spans: Sequence[ImageSpan], plans: Sequence[ImagePlan]) -> np.ndarray:
        """Rotary positions, int64 [axes, input_length]."""

    def placeholder(self, plan: ImagePlan) -> str:
        """The text that takes the place of the prompt's one image token."""
        return "".join(token * count for token, count in self.pieces(plan))
