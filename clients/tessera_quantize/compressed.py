"""The form in which quantized weights are stored: compressed-tensors, ``pack-quantized`` and ``float-quantized``.

Source: the package compressed-tensors 0.19, ``compressors/pack_quantized`` and ``compressors/naive_quantized``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tessera.linear.formats.compressed import Packed
from tessera.linear.formats.int4 import dequantize
from tessera_quantize.rounding import Fp8Weight, Int4Weight

VERSION = "0.19.0"


def pack(nibbles: torch.Tensor) -> torch.Tensor:
    """Values 0..15 [rows, columns] -> int32 [rows, ceil(columns / 8)], the first of eight in the lowest bits."""
    padded = torch.nn.functional.pad(nibbles.to(torch.int32), (0, -nibbles.shape[1] % 8))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=nibbles.device)
    return (padded.unflatten(1, (-1, 8)) << shifts).sum(-1, dtype=torch.int32)


def stored_tensors(weight: Int4Weight | Fp8Weight, symmetric: bool) -> dict[str, torch.Tensor]:
    """What a file holds of one module's weight, by leaf name, on the CPU."""
    if isinstance(weight, Fp8Weight):
        tensors = {"weight": weight.values, "weight_scale": weight.scales}
    else:
        tensors = {
            # Codes are stored with 8 added to a signed number: the unsigned code itself.
            "weight_packed": pack(weight.codes),
            "weight_scale": weight.scales,
            "weight_shape": torch.tensor(weight.codes.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack(weight.zeros.T).T
    return {leaf: tensor.cpu().contiguous() for leaf, tensor in tensors.items()}


def dequantized(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The weight, float32 [out, in], of what :func:`stored_tensors` made."""
    scales = tensors["weight_scale"].float()
    if "weight" in tensors:
        return tensors["weight"].float() * scales
    rows, columns = tensors["weight_shape"].tolist()
    reader = Packed(columns // scales.shape[1], "weight_zero_point" not in tensors, by_group=False)
    read = reader.decode(tensors, rows, columns)
    return dequantize(read["codes"], read["scales"], read["zeros"])


_FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
_FP8_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def quantization_config(
    method: str, group_size: int, symmetric: bool, ignore: Iterable[str], vision: Iterable[str] = ()
) -> dict[str, Any]:
    """``quantization_config`` of config.json. ``ignore``: the linear modules left as they are; ``vision``: those of the
    vision tower that are FP8, whatever ``method`` made of the others."""
    fp8 = {"weights": _FP8_WEIGHTS, "input_activations": _FP8_INPUTS, "format": "float-quantized"}
    int4_weights = dict(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=group_size)
    int4 = {"weights": int4_weights, "input_activations": None, "format": "pack-quantized"}
    groups = {"group_0": {"targets": ["Linear"], "output_activations": None} | (fp8 if method == "fp8" else int4)}
    if vision and method != "fp8":
        groups["group_1"] = {"targets": sorted(vision), "output_activations": None} | fp8
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": sorted(ignore),
        "config_groups": groups,
        "version": VERSION,
    }
