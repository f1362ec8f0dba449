"""The benchmark of attention: what is wrong is seen, what is quantized comes back, and who is compared with whom."""

from typing import Any

import pytest
import torch
from bench import attention

from tessera.kernels.tower_attention import attend_within

LENGTHS = [5, 330, 7]


def inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(sum(LENGTHS), 3, attention.HEADS, attention.HEAD_DIM).unbind(1)


def test_an_error_is_that_of_the_worse_picture() -> None:
    given = inputs()
    rows = attend_within(LENGTHS, torch.device("cpu"))(*given)
    assert attention.wrong(rows, given, LENGTHS) < 1e-5
    rows[-3:] *= 1.1
    assert 0.05 < attention.wrong(rows, given, LENGTHS) < 0.1


def test_e4m3_has_a_scale_for_each_picture_and_head() -> None:
    rows = inputs()[0] * torch.arange(1, attention.HEADS + 1)[:, None]
    values, scales = attention.in_e4m3(rows, LENGTHS)
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (3, attention.HEADS)
    of_rows = scales.repeat_interleave(torch.tensor(LENGTHS), 0)[..., None]
    assert attention.error(values.float() * of_rows, rows) < 0.03
    assert (values.float().abs().amax(2) <= 448).all() and values.float().abs().max() == 448


def test_the_fastest_of_ours_is_what_others_are_compared_with(printed: Any) -> None:
    times = {"cudnn": [3.0, 3.0], "triton_a": [2.5, 2.5], "gluon_b": [2.0, 2.0], "fa3": [1.0, 1.0]}
    attention.report("vision.attention_seed", times)
    found = printed()
    assert found["vision.attention_seed.ms"]["value"] == 2.0 and found["vision.attention_seed.ms"]["way"] == "gluon_b"
    ratios = {name: line["value"] for name, line in found.items() if name.endswith("over_ours")}
    assert ratios == {"vision.attention_seed.cudnn_over_ours": 1.5, "vision.attention_seed.fa3_over_ours": 0.5}


def test_a_trial(emitted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TURNS", 2)
    monkeypatch.setattr(attention, "varlen_backends", lambda *_: {"default": attend_within, "none": None})
    line = emitted(attention, "--device", "cpu", "--batches", "seed")["trial.vision.attention_seed.ms"]
    assert list(line["ways"]) == ["default"] and line["ways"]["default"] == line["value"] > 0
    assert line["errors"]["default"] < 0.01
