"""The tower's faster parts against the plain ones; kernels run in triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from tiny_checkpoints import Shape, hf_native
from torch import nn

from tessera.kernels.reference import add_and_norm
from tessera.kernels.tower_attention import attend_class_apart
from tessera.kernels.tower_layers import PLAIN, gpu_kernels
from tessera.kernels.tuning import MeasuredChoices
from tessera.models.registry import read_config
from tessera.models.tower import load_tower

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels.norm import add_layer_norm

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# The interpreter computes bfloat16 wrongly without saying so.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * HAS_GPU
EPS = 1e-6


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (2, 3, 1024), (5, 100), (1, 8192)])
@pytest.mark.parametrize("has_update", [True, False])
def test_add_layer_norm(dtype, shape, has_update):
    x, update = normal(2, *shape, dtype=dtype) * 3 + 1
    weight, bias = normal(2, shape[-1], dtype=dtype, seed=1)
    update = update if has_update else None
    norm = nn.LayerNorm(shape[-1], EPS, dtype=dtype, device=DEVICE).requires_grad_(False)
    norm.weight.copy_(weight), norm.bias.copy_(bias)
    expected, expected_sum = add_and_norm(x, update, norm)
    given = x.clone()
    actual, total = add_layer_norm(given, update, weight, bias, EPS)
    assert total is given
    assert torch.equal(total, expected_sum)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=2 * step, atol=max(2 * step, 4e-6))


def test_add_layer_norm_rounds_the_sum_first():
    # 2048 + 1 is no float16 number: the unrounded sum would have a mean and a variance of its own.
    x = torch.full((1, 16), 2048.0, dtype=torch.float16, device=DEVICE)
    update = torch.ones_like(x)
    update[0, ::2] = 0
    ones = torch.ones(16, dtype=torch.float16, device=DEVICE)
    normed, total = add_layer_norm(x, update, ones, ones, EPS)
    assert torch.equal(total, torch.full_like(total, 2048)) and torch.equal(normed, torch.ones_like(normed))


def test_add_layer_norm_of_values_far_from_zero():
    """Two passes over the row: the difference of two squares would leave nothing of so small a variance."""
    x = 1000 + normal(3, 64) / 100
    expected = torch.nn.functional.layer_norm(x.double(), (64,), eps=EPS).float()
    actual, _ = add_layer_norm(x, None, torch.ones(64, device=DEVICE), torch.zeros(64, device=DEVICE), EPS)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("x", "update", "message"),
    [
        (torch.ones(2, 8193), None, "at most 8192"),
        (torch.ones(16, 2).T, None, "contiguous"),
        (torch.ones(2, 16), torch.ones(16, 2).T, "contiguous"),
    ],
)
def test_add_layer_norm_refuses(x, update, message):
    with pytest.raises(ValueError, match=message):
        add_layer_norm(x, update, torch.ones(x.shape[-1]), torch.zeros(x.shape[-1]), EPS)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "silu"])
def test_the_activation_in_place(activation):
    linear, x = nn.Linear(8, 16).requires_grad_(False).to(DEVICE), normal(3, 5, 8)
    expected = PLAIN.linear_and_activate(x, linear, activation)
    torch.testing.assert_close(gpu_kernels().linear_and_activate(x, linear, activation), expected)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(image_size=56, patch_size=14),
        Shape(image_size=56, patch_size=14, norm_type="rms_norm", qk_norm=True, hidden_act="silu"),
        Shape(image_size=56, patch_size=14, feature_layer=-2),
        Shape(image_size=56, patch_size=14, mean_pooling=False),
    ],
    ids=["layer_norm", "rms_norm", "earlier layer", "final norm"],
)
@pytest.mark.parametrize("epilogue", [False, True])
def test_a_tower_of_faster_kernels_gives_the_same_rows(tmp_path, shape, epilogue):
    tower = load_tower(read_config(hf_native(tmp_path, shape))).to(DEVICE)
    pixels = (torch.arange(2 * 56 * 56 * 3) % 251).to(torch.uint8).view(2, 56, 56, 3).to(DEVICE)
    with torch.inference_mode():
        expected, actual = tower(pixels), tower(pixels, kernels=gpu_kernels(epilogue=epilogue))
    torch.testing.assert_close(actual, expected, atol=1e-3 if epilogue else 2e-5, rtol=1e-3 if epilogue else 1e-5)


def test_each_part_is_chosen_by_measurement(tmp_path, monkeypatch):
    folder = hf_native(tmp_path / "tiny", Shape(image_size=56, patch_size=14))
    tower = load_tower(read_config(folder), torch.bfloat16).to(DEVICE)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some card")
    questions = []

    class Scripted(MeasuredChoices):
        def fastest(self, question, ways):
            questions.append(question)
            assert all(callable(way) for way in ways.values())
            return list(ways)[-1]

    kernels = tower.tuned(3, Scripted(tmp_path / "choices.json", lambda way: 1.0)).keywords["kernels"]
    assert kernels.attend is attend_class_apart
    assert kernels.epilogue
    attention, gelu = questions
    for named in ("3 x 17", "heads of", "torch.bfloat16", "some card"):
        assert named in attention
    for named in ("gelu", "51 rows", "torch.bfloat16", "some card"):
        assert named in gelu
    wide = load_tower(read_config(folder)).to(DEVICE)
    exact = wide.tuned(3, Scripted(tmp_path / "choices.json", lambda way: 1.0)).keywords["kernels"]
    assert not exact.epilogue and len(questions) == 2
