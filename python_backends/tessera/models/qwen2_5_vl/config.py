"""transformers' layout of Qwen2.5-VL, ``Qwen2_5_VLForConditionalGeneration``: Qwen2-VL's but for the tower.

Defaults: ``configuration_qwen2_5_vl.py``, whose class is wider than any published tower; weight names:
``modeling_qwen2_5_vl.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tessera.checkpoint.config import CheckpointConfig, NameTable
from tessera.checkpoint.weights import WBS
from tessera.errors import CheckpointError
from tessera.models.qwen2_vl import config as qwen2_vl

_MLP = r"(?:model\.)?visual\.blocks\.(\d+)\.mlp\."
VISION_NAMES: NameTable = (
    *qwen2_vl.VISION_NAMES,
    (rf"{_MLP}(gate|up)_proj\.{WBS}", r"layers.\1.mlp.\2_proj.\3"),
    (rf"{_MLP}down_proj\.{WBS}", r"layers.\1.mlp.linear2.\2"),
)


@dataclass(frozen=True)
class VisionConfig(qwen2_vl.RelativeConfig):
    """``out_hidden_size`` is the width of the rows.

    Layers but those of ``fullatt_block_indexes`` attend within windows of ``window_size`` pixels, rounded down to whole
    groups of patches. An index beyond the layers names none, as in the reference.
    """

    depth: int = 32
    hidden_size: int = 3584
    intermediate_size: int = 3420
    num_heads: int = 16
    hidden_act: Literal["silu"] = "silu"
    out_hidden_size: int = 3584
    tokens_per_second: int = 4  # spreads a video's frames over positions, and so means nothing here
    window_size: int = 112
    fullatt_block_indexes: Sequence[int] = (7, 15, 23, 31)

    @property
    def window(self) -> int:
        """Groups of patches along a window's side."""
        return self.window_size // (self.spatial_merge_size * self.patch_size)


def read(folder: Path, raw: dict[str, Any]) -> CheckpointConfig:
    """The configuration of a folder whose config.json is ``raw``. Raises CheckpointError."""
    config = qwen2_vl.read(folder, raw, VisionConfig, rows="out_hidden_size", names=VISION_NAMES, layout="qwen2_5_vl")
    vision, where = config.vision, f"{folder}/config.json: vision_config"
    if not vision.window:
        least = vision.spatial_merge_size * vision.patch_size
        raise CheckpointError(f"{where}.window_size {vision.window_size} is less than a group of patches, {least}")
    indexes = vision.fullatt_block_indexes
    if not isinstance(indexes, (list, tuple)) or any(type(index) is not int or index < 0 for index in indexes):
        raise CheckpointError(
            f"{where}.fullatt_block_indexes must be a list of whole numbers from 0, not {indexes!r:.50}"
        )
    return config
