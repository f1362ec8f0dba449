"""What we store, read by the package compressed-tensors itself."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from quantize_fakes import rtn

from tessera.linear.formats.int4 import dequantize
from tessera_quantize.checkpoint import dequantized, quantization_config, stored_tensors
from tessera_quantize.methods import Int4Weight, to_fp8


@pytest.mark.parametrize(
    ("method", "symmetric", "rows"),
    [("rtn", False, 24), ("rtn", False, 13), ("rtn", True, 13), ("fp8", True, 13)],  # eight zeros of 13 share a word
)
def test_four_bits(method: str, symmetric: bool, rows: int) -> None:
    weight = torch.randn(rows, 48, generator=torch.Generator().manual_seed(0))
    made = to_fp8(weight, torch.float32) if method == "fp8" else rtn(weight, 16, symmetric, torch.float32)
    stored = stored_tensors(made, symmetric)
    if isinstance(made, Int4Weight):
        expected = dequantize(made.codes, made.scales, made.zeros.float())
        assert stored["weight_packed"].dtype == torch.int32 and stored["weight_packed"].shape == (rows, 6)
    else:
        expected = made.values.float() * made.scales
    assert ("weight_zero_point" in stored) != symmetric
    assert torch.equal(dequantized(stored), expected)
    raw = quantization_config(method, 16, symmetric, ["lm_head"])
    config = QuantizationConfig.model_validate({name: value for name, value in raw.items() if name != "quant_method"})
    scheme = config.config_groups["group_0"]
    theirs = BaseCompressor.get_value_from_registry(scheme.format).decompress(stored, scheme)["weight"]
    assert torch.equal(theirs, expected)
