"""What we store, read by the package compressed-tensors itself."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from quantize_fakes import rtn

from tessera.linear.formats.gptq import unpack
from tessera.linear.formats.int4 import dequantize
from tessera_quantize.compressed import dequantized, pack, quantization_config, stored_tensors
from tessera_quantize.rounding import to_fp8


def theirs(stored: dict[str, torch.Tensor], method: str, symmetric: bool = False) -> torch.Tensor:
    raw = quantization_config(method, 16, symmetric, ["lm_head"])
    config = QuantizationConfig.model_validate({name: value for name, value in raw.items() if name != "quant_method"})
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    return compressor.decompress(stored, scheme)["weight"]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("rows", [24, 13])
def test_four_bits(rows, symmetric):
    made = rtn(torch.randn(rows, 48, generator=torch.Generator().manual_seed(0)), 16, symmetric, torch.float32)
    stored = stored_tensors(made, symmetric)
    assert stored["weight_packed"].dtype == torch.int32 and stored["weight_packed"].shape == (rows, 6)
    assert ("weight_zero_point" in stored) != symmetric
    expected = dequantize(made.codes, made.scales, made.zeros.float())
    assert torch.equal(dequantized(stored), expected)
    assert torch.equal(theirs(stored, "awq", symmetric), expected)


def test_fp8():
    made = to_fp8(torch.randn(12, 40, generator=torch.Generator().manual_seed(0)), torch.float32)
    stored = stored_tensors(made, symmetric=True)
    assert torch.equal(dequantized(stored), made.values.float() * made.scales)
    assert torch.equal(theirs(stored, "fp8"), made.values.float() * made.scales)


@pytest.mark.parametrize("columns", [8, 9, 31, 64])
def test_packing_comes_back(columns):
    nibbles = torch.randint(0, 16, (5, columns), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    words = pack(nibbles)
    assert words.shape == (5, -(-columns // 8)) and words.dtype == torch.int32
    assert torch.equal(unpack(words)[:, :columns], nibbles)
    assert int(words[0, 0]) & 15 == int(nibbles[0, 0])


def test_two_formats_in_one_file_are_called_mixed():
    config = quantization_config("awq", 128, False, ["lm_head"], ["model.vision_tower.encoder.layer.0.mlp.fc1"])
    assert config["format"] == "mixed-precision"
    assert config["config_groups"]["group_1"]["targets"] == ["model.vision_tower.encoder.layer.0.mlp.fc1"]
    assert quantization_config("fp8", 128, False, [])["format"] == "float-quantized"
