"""InternVL: 448-pixel tiles and a thumbnail, a fixed number of tokens a tile.

Rules: OpenGVLab/InternVL dataset.py ``dynamic_preprocess`` for the original layout, transformers
``image_processing_got_ocr2.py`` for HF-native checkpoints. They differ in the order of grids of equal area only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from tessera.errors import CheckpointError, InvalidRequest
from tessera.family.checkpoint_files import read_json
from tessera.family.family import KIND_TILES, ImagePlan, ImageSpan, ModelFamily
from tessera.family.tile_policy import TilePolicy

if TYPE_CHECKING:
    from tessera.checkpoint.config import CheckpointConfig

PILLOW_BICUBIC = 3
# What a native grid may lose: pixels (its own to the picture's) and shape (the longer over the shorter stretch).
NATIVE_PIXELS = 0.75
NATIVE_STRETCH = 1.5


@lru_cache(maxsize=256)
def candidate_grids(layout: str, min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """All (columns, rows) with min_tiles <= columns * rows <= max_tiles, by area, then in the reference's order.

    The original code collects the grids in a set and sorts by area alone, so that the set's own order decides inside
    one area (and with it, ties); the HF-native processor enumerates a list, columns outermost.
    """
    sides = range(1, max_tiles + 1)
    if layout == "internvl_chat":
        # Insertion order takes part in a set's order when hashes collide, hence the loop over n as in the original.
        grids = list(
            {
                (columns, rows)
                for n in range(min_tiles, max_tiles + 1)
                for columns in range(1, n + 1)
                for rows in range(1, n + 1)
                if min_tiles <= columns * rows <= max_tiles
            }
        )
    else:
        grids = [(columns, rows) for columns in sides for rows in sides if min_tiles <= columns * rows <= max_tiles]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


@lru_cache(maxsize=4096)
def best_grid(layout: str, width: int, height: int, tile: int, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """The grid nearest in aspect; on an exact tie the later one if the picture fills more than half of its pixels."""
    best, best_difference = (1, 1), float("inf")
    aspect, area = width / height, width * height
    for columns, rows in candidate_grids(layout, min_tiles, max_tiles):
        difference = abs(aspect - columns / rows)
        if difference < best_difference:
            best, best_difference = (columns, rows), difference
        elif difference == best_difference and area > 0.5 * tile * tile * columns * rows:
            best = (columns, rows)
    return best


@lru_cache(maxsize=4096)
def native_grid(layout: str, width: int, height: int, tile: int, min_tiles: int, max_tiles: int) -> tuple[int, int]:
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

    grids = candidate_grids(layout, min_tiles, max_tiles)
    most_stretch = max(NATIVE_STRETCH, min(map(stretch, grids)))
    return min((grid for grid in grids if stretch(grid) <= most_stretch), key=cost)


GRIDS = {"aspect": best_grid, "native": native_grid}


class InternVL(ModelFamily):
    """Both checkpoint layouts: HF-native ``InternVLForConditionalGeneration`` and ``InternVLChatModel``."""

    user_tokens = ("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>")
    cost_unit = "tiles"

    def __init__(self, config: CheckpointConfig) -> None:
        self.layout = config.layout
        self.tile = config.vision.image_size
        self.unit_shape = (self.tile, self.tile, 3)
        self.image_token_id = config.image_token_id
        side = self.tile // config.vision.patch_size * config.downsample_ratio
        if side < 1 or side != int(side):
            raise CheckpointError(
                f"image size {self.tile}, patch size {config.vision.patch_size} and downsample ratio "
                f"{config.downsample_ratio} give {side} tokens along a tile's side; a whole number is needed"
            )
        self.tokens_per_tile = int(side) ** 2
        self.start_token, self.image_token, self.end_token = _image_tokens(config)
        self.control_tokens = (self.start_token, self.image_token, self.end_token)
        self._default_policy = _stated_policy(config, self.tokens_per_tile)

    def default_policy(self) -> TilePolicy:
        return self._default_policy

    def plan(self, width: int, height: int, policy: TilePolicy) -> ImagePlan:
        most = policy.largest_grid(self.tokens_per_tile)
        columns, rows = GRIDS[policy.grid](self.layout, width, height, self.tile, policy.min_tiles, most)
        thumbnail = policy.has_thumbnail(columns * rows)
        tiles = columns * rows + thumbnail
        return ImagePlan(
            KIND_TILES, tiles, self.tile, self.tile, columns, rows, thumbnail, tiles * self.tokens_per_tile
        )

    def plan_of(self, wire: tuple[int, int, int]) -> ImagePlan:
        tiles, rows, columns = wire
        if rows < 1 or columns < 1 or tiles - rows * columns not in (0, 1):
            raise InvalidRequest(
                f"{tiles} tiles are not a grid of {columns}x{rows} (columns, rows), with or without a thumbnail"
            )
        thumbnail, tokens = tiles > rows * columns, tiles * self.tokens_per_tile
        return ImagePlan(KIND_TILES, tiles, self.tile, self.tile, columns, rows, thumbnail, tokens)

    def pieces(self, plan: ImagePlan) -> tuple[tuple[str, int], ...]:
        return (self.start_token, 1), (self.image_token, plan.tokens), (self.end_token, 1)

    def positions(self, input_length: int, spans: Sequence[ImageSpan], plans: Sequence[ImagePlan]) -> np.ndarray:
        return np.arange(input_length, dtype=np.int64)[None]


def _image_tokens(config: CheckpointConfig) -> tuple[str, str, str]:
    """Start, context and end token. HF-native tokenizer configs name them, flat or under extra_special_tokens."""
    stated = read_json(config.folder, "tokenizer_config.json")
    extra = stated.get("extra_special_tokens")
    names = {**(extra if isinstance(extra, dict) else {}), **stated}
    return (
        names.get("start_image_token", "<img>"),
        names.get("context_image_token", "<IMG_CONTEXT>"),
        names.get("end_image_token", "</img>"),
    )


def _stated_policy(config: CheckpointConfig, tokens_per_tile: int) -> TilePolicy:
    """The policy in the checkpoint's processor or config; refuses settings that would change the pixels silently."""
    if config.layout == "internvl_chat":
        raw = config.raw
        most = raw.get("max_dynamic_patch", 12) if raw.get("dynamic_image_size", True) else 1
        return TilePolicy(
            "checkpoint",
            min(raw.get("min_dynamic_patch", 1), most),
            most,
            "auto" if raw.get("use_thumbnail", True) else "never",
        )
    processor = config.processor
    stated_tokens = processor.get("image_seq_length", config.raw.get("image_seq_length", tokens_per_tile))
    if stated_tokens != tokens_per_tile:
        raise CheckpointError(
            f"the checkpoint states image_seq_length {stated_tokens}, but its vision config gives {tokens_per_tile}"
        )
    side = config.vision.image_size
    if processor.get("size", {"height": side, "width": side}) != {"height": side, "width": side}:
        raise CheckpointError(f"the processor's size {processor['size']} differs from the tower's image size {side}")
    if processor.get("resample", PILLOW_BICUBIC) != PILLOW_BICUBIC:
        raise CheckpointError(f"resample {processor['resample']} is not supported; supported is 3 (bicubic)")
    return TilePolicy("checkpoint", processor.get("min_patches", 1), processor.get("max_patches", 12), "auto")
