"""InternVL: square tiles and a thumbnail, a fixed number of tokens a tile.

Rules: OpenGVLab/InternVL dataset.py ``dynamic_preprocess`` for the original layout, transformers
``image_processing_got_ocr2.py`` for HF-native checkpoints. They differ in the order of grids of equal area only.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.files import read_token_names
from tessera.errors import CheckpointError, InvalidRequest
from tessera.models.family import ImagePlan, ModelFamily, View
from tessera.models.tile_policy import TILE_POLICIES, TilePolicy

# What a native grid may lose: pixels (its own to the picture's) and shape (the longer over the shorter stretch).
NATIVE_PIXELS = 0.75
NATIVE_STRETCH = 1.5
IMAGE_TOKENS = {"start": "<img>", "context": "<IMG_CONTEXT>", "end": "</img>"}


@lru_cache(maxsize=256)
def candidate_grids(order: str, min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """All (columns, rows) with min_tiles <= columns * rows <= max_tiles, by area, then in the reference's order.

    The original code collects the grids in a set and sorts by area alone, so that the set's own order decides inside
    one area (and with it, ties); the HF-native processor enumerates a list, columns outermost.
    """

    def within(side: int) -> list[tuple[int, int]]:
        numbers = range(1, side + 1)
        return [(columns, rows) for columns in numbers for rows in numbers if min_tiles <= columns * rows <= max_tiles]

    grids = within(max_tiles)
    if order == "set":
        # Insertion order takes part in a set's order when hashes collide, hence the loop over n as in the original.
        grids = list({grid for n in range(min_tiles, max_tiles + 1) for grid in within(n)})
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


@lru_cache(maxsize=4096)
def best_grid(order: str, width: int, height: int, tile: int, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """The grid nearest in aspect; on an exact tie the later one if the picture fills more than half of its pixels."""
    best, best_difference = (1, 1), float("inf")
    aspect, area = width / height, width * height
    for columns, rows in candidate_grids(order, min_tiles, max_tiles):
        difference = abs(aspect - columns / rows)
        if difference < best_difference:
            best, best_difference = (columns, rows), difference
        elif difference == best_difference and area > 0.5 * tile * tile * columns * rows:
            best = (columns, rows)
    return best


@lru_cache(maxsize=4096)
def native_grid(order: str, width: int, height: int, tile: int, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """The grid of fewest tiles with at least 0.75 of the picture's pixels and its aspect within a factor of 1.5.

    Where no allowed grid has the pixels, the largest of the aspect; where none has the aspect, the nearest one. Among
    grids of as many tiles the least stretched, then the wider. Takes the arguments of :func:`best_grid`.
    """

    def stretch(grid: tuple[int, int]) -> float:
        across, down = grid[0] * height, grid[1] * width
        return max(across, down) / min(across, down)

    def cost(grid: tuple[int, int]) -> tuple[float, int, float, int]:
        tiles = grid[0] * grid[1]
        missing_pixels = max(0.0, NATIVE_PIXELS * width * height - tiles * tile * tile)
        return missing_pixels, tiles, stretch(grid), -grid[0]

    grids = candidate_grids(order, min_tiles, max_tiles)
    most_stretch = max(NATIVE_STRETCH, min(map(stretch, grids)))
    return min((grid for grid in grids if stretch(grid) <= most_stretch), key=cost)


GRIDS = {"aspect": best_grid, "native": native_grid}


class InternVL(ModelFamily):
    """Of any size and body, in either layout. ``wire`` is (tiles, rows, columns) of the grid."""

    user_tokens = ("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>")
    cost_unit = "tiles"
    max_cost = 104
    policy_keys = ("tile_policy",)
    policy_names = tuple(TILE_POLICIES)
    reduce_hint = "lower tile_policy's max_tiles"

    def __init__(self, config: CheckpointConfig) -> None:
        rule = config.pictures
        self.order = rule.order
        self.tile = config.vision.image_size
        self.unit_shape = (self.tile, self.tile, 3)
        self.tokens_per_tile = config.vision.tokens_per_tile
        self.image_token_id = config.image_token_id
        names = read_token_names(config.folder)
        self.control_tokens = tuple(names.get(f"{place}_image_token", token) for place, token in IMAGE_TOKENS.items())
        self.start_token, self.image_token, self.end_token = self.control_tokens
        try:
            self._checkpoint_policy = TilePolicy("checkpoint", rule.min_tiles, rule.max_tiles, rule.thumbnail)
        except InvalidRequest as error:
            raise CheckpointError(f"min_patches or max_patches of the checkpoint: {error}") from None

    def policy(
        self, asked: Mapping[str, Any], default: TilePolicy | None = None, max_cost: int | None = None
    ) -> TilePolicy:
        super().policy(asked)
        value = asked.get("tile_policy")
        policy = TilePolicy.parse(value, default or self._checkpoint_policy)
        if value and max_cost is not None and policy.max_tiles > max_cost:
            raise InvalidRequest(
                f"tile policy: max_tiles {policy.max_tiles!r:.20} is above this server's limit of {max_cost} tiles a "
                "request"
            )
        # A token budget too small for any picture is refused here.
        policy.largest_grid(self.tokens_per_tile)
        return policy

    def low_detail(self, policy: TilePolicy) -> TilePolicy:
        return TilePolicy("low", 1, 1, "never")

    def plan(self, width: int, height: int, policy: TilePolicy) -> ImagePlan:
        most = policy.largest_grid(self.tokens_per_tile)
        columns, rows = GRIDS[policy.grid](self.order, width, height, self.tile, policy.min_tiles, most)
        return self._plan(rows, columns, policy.has_thumbnail(rows * columns))

    def plan_of(self, wire: tuple[int, int, int]) -> ImagePlan:
        tiles, rows, columns = wire
        if rows < 1 or columns < 1 or tiles - rows * columns not in (0, 1):
            raise InvalidRequest(f"{tiles} tiles are not a grid of {columns}x{rows} with or without a thumbnail")
        return self._plan(rows, columns, thumbnail=tiles > rows * columns)

    def last_part(self, plan: ImagePlan) -> ImagePlan | None:
        tiles, rows, columns = plan.wire
        return self._plan(1, 1, thumbnail=False) if tiles > rows * columns else None

    def _plan(self, rows: int, columns: int, thumbnail: bool) -> ImagePlan:
        """The grid's tiles row by row, then the thumbnail, if there is one."""
        side = self.tile
        grids = [(rows, columns)] + [(1, 1)] * thumbnail
        views = [
            View(across * side, down * side, (down, side, across, side, 3), (0, 2, 1, 3, 4)) for down, across in grids
        ]
        tiles = rows * columns + thumbnail
        return ImagePlan(tiles * self.tokens_per_tile, tiles, (tiles, rows, columns), tuple(views))

    def placeholder_tokens(self, plan: ImagePlan) -> tuple[tuple[str, int], ...]:
        return (self.start_token, 1), (self.image_token, plan.tokens), (self.end_token, 1)


class QianfanOCR(InternVL):
    """transformers' ``processing_qianfan_ocr.py``."""

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__(config)
        self.template_image = config.processor.get("image_placeholder_token", "<image>")
