"""Into how many tiles a picture is cut: named policies, each with keys that a deployment or a request may change.

What they make of a 480x320 picture at InternVL's 256 tokens a tile:

==================  =======================  ======
policy              tiles                    tokens
==================  =======================  ======
dense               4 x 3 and the thumbnail  3328
reference           3 x 2 and the thumbnail  1792
budget              1                        256
two-tile            2 x 1, no thumbnail      512
native              1                        256
==================  =======================  ======

InternVL's own rule is ``reference``; ``dense`` rules small grids out (7 to 12 tiles). Two tiles may also be one tile
with a thumbnail of the same picture: ``{"max_tiles": 1, "thumbnail": "always"}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tessera.errors import InvalidRequest

THUMBNAIL_RULES = ("auto", "never", "always")
KEYS = ("min_tiles", "max_tiles", "thumbnail", "token_budget")


@dataclass(frozen=True)
class TilePolicy:
    """How many tiles a picture may become, and which grid it gets of those allowed.

    ``min_tiles`` and ``max_tiles`` bound the grid alone. ``thumbnail``: "auto" appends the whole picture as a last
    tile when the grid has more than one tile, "always" also for a one-tile grid, "never" not at all.
    ``token_budget``: the most tokens one picture may take, thumbnail included; None for no bound but ``max_tiles``.
    ``grid``: "aspect" takes the grid nearest in aspect, however small the picture (InternVL's rule), "native" the
    smallest one that keeps the picture's own resolution.
    """

    name: str = "reference"
    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: str = "auto"
    token_budget: int | None = None
    grid: str = "aspect"

    def __post_init__(self) -> None:
        for key in ("min_tiles", "max_tiles", "token_budget"):
            value = getattr(self, key)
            if (value is not None or key != "token_budget") and (type(value) is not int or value < 1):
                raise InvalidRequest(f"tile policy: {key} must be a whole number of at least 1, not {value!r:.50}")
        if self.min_tiles > self.max_tiles:
            raise InvalidRequest(
                f"tile policy: min_tiles {self.min_tiles!r:.20} is above max_tiles {self.max_tiles!r:.20}; "
                "raise max_tiles"
            )
        if self.thumbnail not in THUMBNAIL_RULES:
            raise InvalidRequest(f"tile policy: thumbnail must be one of {THUMBNAIL_RULES}, not {self.thumbnail!r:.50}")

    def has_thumbnail(self, grid_tiles: int) -> bool:
        """Whether a grid of this many tiles gets a thumbnail."""
        return self.thumbnail == "always" or (self.thumbnail == "auto" and grid_tiles > 1)

    def largest_grid(self, tokens_per_tile: int) -> int:
        """The most tiles a grid may have, so that with its thumbnail it is within ``token_budget``.

        Raises InvalidRequest where not even a grid of ``min_tiles`` is.
        """
        if self.token_budget is None:
            return self.max_tiles
        tiles = self.token_budget // tokens_per_tile
        # The thumbnail is one of them, but for a single tile that needs none.
        grid = tiles - 1 if self.has_thumbnail(tiles) else tiles
        if grid < self.min_tiles:
            least = (self.min_tiles + self.has_thumbnail(self.min_tiles)) * tokens_per_tile
            raise InvalidRequest(
                f"tile policy: token_budget {self.token_budget} is less than the {least} tokens of the smallest grid "
                f"({self.min_tiles} tiles{' and a thumbnail' if self.has_thumbnail(self.min_tiles) else ''})"
            )
        return min(grid, self.max_tiles)

    @staticmethod
    def parse(value: TilePolicy | Mapping[str, Any] | str | None, default: TilePolicy) -> TilePolicy:
        """A request's policy: a preset's name, JSON text or a mapping whose keys override a preset.

        Without ``name`` the keys override ``default`` (the deployment's policy). Raises InvalidRequest.
        """
        if value is None or isinstance(value, TilePolicy):
            return value or default
        keys = stated_keys(value)
        name = keys.pop("name", None)
        known = [default, *TILE_POLICIES.values()]
        base = default if name is None else next((policy for policy in known if policy.name == name), None)
        if base is None:
            raise InvalidRequest(f"tile policy name {name!r:.50} is unknown; known are {sorted(TILE_POLICIES)}")
        unknown = sorted(str(key) for key in keys if key not in KEYS)
        if unknown:
            raise InvalidRequest(f"tile policy: unknown key {unknown[0]!r:.50}; known are {', '.join(('name', *KEYS))}")
        return replace(base, **keys)


def stated_keys(value: Any) -> dict[str, Any]:
    """What a policy's name, JSON text or mapping states; of a name the key ``name``. Raises InvalidRequest."""
    if isinstance(value, str):
        if not value.lstrip().startswith("{"):
            return {"name": value.strip()}
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"tile policy is not valid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"tile policy must be a name or an object, not {type(value).__name__}")
    return dict(value)


TILE_POLICIES = {
    policy.name: policy
    for policy in (
        TilePolicy("reference", 1, 12, "auto"),
        TilePolicy("dense", 7, 12, "auto"),
        TilePolicy("two-tile", 2, 2, "never"),
        # The budget is meant to be set: this one is a picture of three tiles and a thumbnail at 256 tokens a tile.
        TilePolicy("budget", 1, 12, "auto", token_budget=1024),
        TilePolicy("native", 1, 12, "auto", grid="native"),
    )
}
