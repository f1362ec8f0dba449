"""The FP8 scheme as a GPU runs it (its twins compute here), and quantizing while a checkpoint is read."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from measured_fakes import Choices, fill

from tessera.errors import CheckpointError
from tessera.kernels.fp8_rows import E4M3, Fp8Rows, Fp8Sums, quantize_rows, quantize_weight
from tessera.linear.formats.fp8 import Fp8, Fp8OnLoad
from tessera.linear.quantization import scheme_selector
from tessera.linear.scheme import PRODUCTS, Linear, LinearScheme, LinearShape
from tessera.linear.tuning import choose
from tessera.linear.unquantized import Unquantized

CPU = torch.device("cpu")
SIZE, PARTS = 128, {"gate": 48, "up": 48}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def layer_of(scheme: LinearScheme, bias: bool = False, size: int = SIZE) -> Linear:
    rows = {"gate": slice(0, 48), "up": slice(48, 96)}
    return Linear(size, rows, bias, lambda modules: scheme, torch.float32, CPU)


def tensors(bias: bool = False) -> dict[str, torch.Tensor]:
    """A checkpoint's, in bfloat16, rows of very different magnitudes."""
    stored = {
        f"{name}.weight": normal(rows, SIZE) * torch.logspace(-2, 1, rows)[:, None] for name, rows in PARTS.items()
    }
    if bias:
        stored |= {f"{name}.bias": normal(rows) for name, rows in PARTS.items()}
    return {name: tensor.bfloat16() for name, tensor in stored.items()}


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with FP8 units."""
    monkeypatch.setattr(Fp8, "_has_units", lambda scheme, layer: not scheme.blocks)


def fake_quantized(x: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What a torch model computes whose weights and activations were rounded to e4m3 and back."""
    weight = torch.cat([stored["gate.weight"], stored["up.weight"]]).float()
    scales = weight.abs().amax(1, keepdim=True) / 448
    weight = (weight * (1 / scales)).to(E4M3).float() * scales
    x_scales = x.float().abs().amax(1, keepdim=True) / 448
    x = (x.float() * (1 / x_scales)).to(E4M3).float() * x_scales
    bias = torch.cat([stored["gate.bias"], stored["up.bias"]]).float() if "gate.bias" in stored else None
    return F.linear(x, weight, bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("product", PRODUCTS)
def test_every_product_computes_the_same(units, bias, product):
    stored, x = tensors(bias), normal(7, SIZE)
    scheme = Fp8OnLoad()
    scheme.ways = ((64, product),)
    layer = fill(layer_of(scheme, bias), stored)
    assert layer.weight.dtype == E4M3 and layer.scales.shape == (96,)
    expected = fake_quantized(x, stored)
    torch.testing.assert_close(layer(x), expected)
    assert layer.wants_fp8_input(7) and layer(x[:0]).shape == (0, 96)
    rows = quantize_rows(x)
    torch.testing.assert_close(layer(rows), expected)
    deferred = layer.deferred(rows)
    assert isinstance(deferred, Fp8Sums) == (product == "rescaled")
    torch.testing.assert_close(deferred.product() if product == "rescaled" else deferred, expected)
    gated = F.silu(expected[:, :48]) * expected[:, 48:]
    for given in (x, rows):
        torch.testing.assert_close(layer.gated(given), gated, rtol=1e-5, atol=1e-4)
        quantized = layer.gated(given, fp8=True)
        assert isinstance(quantized, Fp8Rows)
        torch.testing.assert_close(quantized.dequantized(), quantize_rows(gated).dequantized(), rtol=0.07, atol=1e-3)


def test_a_static_scale_takes_rows_as_they_are(units):
    weight, scales = quantize_weight(normal(96, SIZE))
    stored = {}
    for name, rows in {"gate": slice(0, 48), "up": slice(48, 96)}.items():
        stored |= {f"{name}.weight": weight[rows], f"{name}.weight_scale": scales[rows, None]}
        stored[f"{name}.input_scale"] = torch.tensor(0.004)
    layer = fill(layer_of(Fp8(static=True)), stored)
    assert not layer.wants_fp8_input(3)
    x = normal(3, SIZE)
    rounded = (x / 0.004).clamp(-448, 448).to(E4M3).float() * 0.004
    assert (rounded - x).abs().max() > 0.5  # something saturates
    torch.testing.assert_close(layer(x), rounded @ (weight.float() * scales[:, None]).T)


def test_blocks_are_multiplied_dequantized(units):
    stored = {}
    for name in PARTS:
        stored |= {f"{name}.weight": normal(48, 200).to(E4M3), f"{name}.weight_scale_inv": torch.tensor([[0.5, 2.0]])}
    layer = fill(layer_of(Fp8("weight_scale_inv", blocks=True), size=200), stored)
    assert not layer.wants_fp8_input(3) and layer.weight.dtype == torch.float32
    scales = torch.tensor([0.5, 2.0]).repeat_interleave(128)[:200]
    assert torch.equal(layer.weight, torch.cat([stored[f"{name}.weight"] for name in PARTS]).float() * scales)
    x = normal(3, 200) * torch.logspace(-2, 2, 200)
    rounded = torch.cat([quantize_rows(part.contiguous()).dequantized() for part in x.split(128, 1)], 1)
    torch.testing.assert_close(layer(x), F.linear(rounded, layer.weight))
    assert not torch.allclose(layer(x), F.linear(x, layer.weight), rtol=1e-3)


def test_tuning_asks_which_product_is_the_fastest(units):
    layers = [fill(layer_of(Fp8OnLoad()), tensors()) for _ in range(2)]
    choices = Choices()
    shape = LinearShape(96, SIZE, False, "gate_up", torch.float32)
    choose(layers, shape, choices, "a machine")
    assert len(choices.asked) == 8
    assert [len(ways) for ways in choices.asked.values()] == [3, 3, 3, 3, 3, 3, 2, 2]
    assert all("fp8 linear" in question and "a machine" in question for question in choices.asked)
    for layer in layers:
        assert layer.scheme.ways[-3:] == ((256, "skinny"), (512, "rows"), (1024, "rows"))


def test_the_setting_quantizes_all_but_the_head_and_no_quantized_checkpoint():
    schemes = scheme_selector(None, None, "fp8")
    assert type(schemes(["model.layers.0.self_attn.q_proj"])) is Fp8OnLoad
    assert type(schemes(["lm_head"])) is Unquantized and type(schemes(["output"])) is Unquantized
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    with pytest.raises(CheckpointError, match=r"quantized already \(fp8\).*\"checkpoint\""):
        scheme_selector(config, None, "fp8")
