"""Qwen2.5-VL's tower: against transformers in fp32, windows of every kind; their order; widths that are filled up."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_qwen2_vl import QWEN2_5_VL
from tiny_qwen2_vl_tower import PATCH, config_of, expected, groups, model_of, picture, save, wires
from transformers.vision_utils import get_vision_window_index

from tessera.models.qwen2_5_vl.vision import GatedMLP
from tessera.models.tower import load_tower


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        dict(fullatt_block_indexes=[]),
        dict(fullatt_block_indexes=[0, 2, 2, 31]),
        dict(fullatt_block_indexes=[0, 1, 2]),
        dict(window_size=28),  # of one group
        dict(window_size=150, intermediate_size=7),  # of five groups, not whole
        dict(patch_size=8, window_size=48, intermediate_size=32, hidden_size=96, num_heads=8),
    ],
    ids=lambda sizes: "-".join(sizes) or "tiny",
)
def test_the_rows_are_those_of_transformers(tmp_path, sizes):
    """Pictures smaller than a window, of whole windows, and cut by them on either side."""
    model, side = model_of(kind=QWEN2_5_VL, **sizes), sizes.get("patch_size", PATCH)
    grids = [(6, 4), (2, 2), (16, 8), (18, 26), (2, 30), (22, 10)]
    save(model, tmp_path, "visual.")
    tower, pixels = load_tower(config_of(tmp_path, QWEN2_5_VL, **sizes)), [picture(grid, side=side) for grid in grids]
    with torch.inference_mode():
        rows = tower(torch.cat([groups(p, side) for p in pixels]), wires(grids))
    torch.testing.assert_close(rows, expected(model, pixels, side), atol=1e-4, rtol=0)


def test_windows_are_those_of_transformers_equal_ones_beside_each_other(tmp_path):
    """Of 300 sets of pictures, and never more than a recorded forward has room for."""
    dice, reached = np.random.default_rng(3), 0.0
    for window in (28, 112, 140):
        tower = load_tower(config_of(tmp_path, QWEN2_5_VL, window_size=window), random_weights=True)
        for _ in range(100):
            grids = (2 * np.exp(dice.uniform(0, 3, (dice.integers(1, 5), 2))).astype(int)).tolist()
            index, ends = get_vision_window_index(torch.tensor(wires(grids)), 2, window, PATCH)
            order, back = tower.order(wires(grids), torch.device("cpu"))
            pictures, lengths = tower.lengths(wires(grids))
            assert pictures == [height * width for height, width in grids]
            assert torch.equal(order[back], torch.arange(len(order)))

            def windows(order, lengths):
                return sorted(part.tolist() for part in order.split([length // 4 for length in lengths]))

            assert windows(order, lengths) == windows(index, ends.diff().tolist())
            runs = 1 + sum(before != after for before, after in pairwise(lengths))
            assert runs <= 4 * len(grids)
            room = sum(pictures) // tower.reaches[1].least + len(grids)
            reached = max(reached, len(lengths) / room)
            assert len(lengths) <= room
    assert reached > 0.8


def test_widths_are_filled_up_with_nothing(tmp_path):
    save(model_of(kind=QWEN2_5_VL), tmp_path)
    tower = load_tower(config_of(tmp_path, QWEN2_5_VL))
    for linear in tower.fp8_linears().values():
        assert linear.in_features % 16 == 0 and linear.out_features % 16 == 0
    mlp = tower.layers[2].mlp
    assert isinstance(mlp, GatedMLP) and (mlp.inner, mlp.linear2.in_features) == (300, 304)
    for whole in (mlp.gate_up.weight, mlp.gate_up.bias[:, None], mlp.linear2.weight.T):
        for half in whole.split(304):
            assert half[:300].any(1).all() and not half[300:].any()
