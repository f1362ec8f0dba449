"""The benches of pictures of any sizes: the work of a forward in numbers, and what is taken for a right result."""

from __future__ import annotations

import pytest
import torch
from bench import picture_attention
from bench import pictures as bench_pictures
from torch.utils.flop_counter import FlopCounterMode

from tessera.kernels.tower_attention import attend_within
from tessera.models.registry import read_config
from tessera.models.tower import unfilled_tower


@pytest.mark.parametrize("side", [2, 8])
def test_the_work_of_a_picture(side):
    tower = unfilled_tower(read_config(bench_pictures.SHAPE), torch.bfloat16)
    pixels = torch.empty(side**2 // 4, *tower.unit_shape, dtype=torch.uint8, device="meta")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        tower(pixels, [(1, side, side)])
    products, attention = bench_pictures.work(side)
    assert counter.get_total_flops() == pytest.approx(1e12 * (products + attention))
    assert attention == 4 * side**4 * 1280 * 32 / 1e12


def test_an_attention_that_leaves_its_picture_is_wrong(monkeypatch):
    monkeypatch.setattr(picture_attention, "DEVICE", torch.device("cpu"))
    lengths = [320, 40]
    inputs = picture_attention._random(lengths)
    exact = picture_attention._exact(lengths, inputs)
    right, wrong = (attend_within(each, torch.device("cpu")) for each in (lengths, [360]))
    assert picture_attention._error(right, inputs, lengths, exact) < 1e-2
    assert picture_attention._error(wrong, inputs, lengths, exact) > 0.1
