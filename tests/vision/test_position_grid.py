"""Positions of a grid that is interpolated for each picture, as each family stretches it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_paddleocr_vl
import tiny_qwen3_vl
import torch
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from tessera.models.paddleocr_vl.vision import PaddleOcrViT
from tessera.models.qwen2_vl.position_grid import GridViT, taps_of
from tessera.models.qwen3_vl.vision import Qwen3ViT
from tessera.models.registry import read_config
from tessera.models.tower import load_tower

GRIDS = [(2, 2), (2, 30), (6, 6), (14, 10), (40, 4)]
WIRES = [(1, *grid) for grid in GRIDS]


@pytest.mark.parametrize(("family", "corners"), [(Qwen3ViT, True), (PaddleOcrViT, False)])
@pytest.mark.parametrize("side", [6, 27, 48])
def test_places_in_the_grid(family: type[GridViT], corners: bool, side: int) -> None:
    grids = [*GRIDS, (48, 48), (94, 50), (200, 2)]
    indices, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor([(1, *grid) for grid in grids]), side, align_corners=corners, spatial_merge_size=2
    )
    taps, shares = (torch.cat(each) for each in zip(*(taps_of(family.on_grid, *grid, 2, side) for grid in grids)))
    torch.testing.assert_close(shares, weights, atol=1e-6, rtol=0)
    assert torch.equal(taps[shares > 0].long(), indices[shares > 0])


@pytest.mark.parametrize("write", [tiny_qwen3_vl.write_model, tiny_paddleocr_vl.write_model])
@torch.inference_mode()
def test_positions_in_16_bits_are_rounded_once(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path)
    config = read_config(tmp_path)
    half, whole = (load_tower(config, dtype) for dtype in (torch.bfloat16, torch.float32))
    pixels = torch.zeros(sum(height * width for height, width in GRIDS) // 4, *whole.unit_shape, dtype=torch.uint8)
    for each in (half, whole):
        each.position_embedding.copy_(half.position_embedding)
        each.patch_embedding.weight.zero_()
        each.patch_embedding.bias.zero_()
    found, exact = (each.embed(pixels, *each.places(WIRES, torch.device("cpu"))[1:]) for each in (half, whole))
    assert torch.equal(found, exact.bfloat16())
