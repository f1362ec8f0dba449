"""compressed-tensors: formats "pack-quantized" (4 bits) and "float-quantized" (FP8).

``weight_packed`` int32 [out, in / 8], packed along the input as q + 8, ``weight_scale`` [out, in / group],
``weight_zero_point`` int32 [out / 8, in / group], packed along the output as z + 8, ``weight_shape`` int64 [2],
``weight_g_idx`` int32 [in]. Source: ``compressed_tensors/compressors``.
"""

from collections.abc import Callable
from functools import partial

import torch

from tessera.checkpoint.weights import TensorError
from tessera.errors import CheckpointError
from tessera.linear.formats import Groups, Settings
from tessera.linear.formats.fp8 import BLOCK, Fp8
from tessera.linear.formats.gptq import unpack
from tessera.linear.formats.int4 import ZERO, Int4
from tessera.linear.scheme import LinearScheme, Tensors, has_values, shaped

_FORMATS = ("pack-quantized", "float-quantized", "naive-quantized")  # the last is another name for FP8's
_BY_GROUP = ("group", "dynamic", True)
"""Activation orders that scatter a group's columns, by all their names; the others leave no trace in the file."""


def read(settings: Settings) -> Groups:
    """quant_method "compressed-tensors"."""
    settings.take("quantization_status", ("compressed", "frozen"), "compressed")
    overall = settings.take("format", (*_FORMATS, "mixed-precision", None))
    settings.drop("global_compression_ratio", "version")
    sparsity = settings.section("sparsity_config")
    if sparsity is not None:
        sparsity.take("format", ("dense",), "dense")
    groups = settings.section("config_groups")
    if groups is None:
        raise CheckpointError(f"{settings.where} has no config_groups")
    return [_group(section, overall) for section in groups.sections()]


def _group(group: Settings, overall: str | None) -> tuple[list[str], Callable[[], LinearScheme]]:
    kind = group.take("format") or overall
    group.check("format", kind, _FORMATS)
    targets = group.take("targets", default=["Linear"])
    weights, inputs = group.section("weights"), group.section("input_activations")
    if weights is None:
        raise CheckpointError(f"{group.where} has no weights")
    group.finish()  # output_activations too are refused there
    scheme = _packed(weights, inputs) if kind == "pack-quantized" else _float(weights, inputs)
    for section in (weights, inputs):
        if section is not None:
            section.drop("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
            section.finish()
    return targets, scheme


def _packed(weights: Settings, inputs: Settings | None) -> Callable[[], LinearScheme]:
    weights.take("num_bits", (4,))
    weights.take("type", ("int",), "int")
    weights.take("dynamic", (False,), False)
    size = weights.take("group_size")
    strategy = weights.take("strategy", ("group", "channel", None)) or ("group" if (size or -1) > 0 else "channel")
    order = weights.take("actorder", (None, False, "weight", "static", *_BY_GROUP))
    if inputs is not None:
        raise CheckpointError(f"{inputs.where}: quantized activations with weights of 4 bits are not supported")
    symmetric = weights.take("symmetric", (True, False), True)
    return partial(Packed, size if strategy == "group" else -1, symmetric, order in _BY_GROUP)


def _float(weights: Settings, inputs: Settings | None) -> Callable[[], LinearScheme]:
    strategy = weights.take("strategy", ("tensor", "channel", "block"))
    blocks = strategy == "block"
    weights.take("dynamic", (False,), False)
    weights.take("group_size", (None, -1))
    weights.take("actorder", (None, False))
    weights.take("block_structure", ([BLOCK, BLOCK], "128x128") if blocks else (None,))
    if inputs is None:
        raise CheckpointError(f"{weights.where}: weights in FP8 with activations that are not are not supported")
    static = not inputs.take("dynamic", (True, False), False)
    inputs.take("strategy", ("group",) if blocks else ("tensor",) if static else ("token",), "tensor")
    inputs.take("group_size", (BLOCK,) if blocks else (None, -1))
    inputs.take("block_structure", (None,))
    inputs.take("actorder", (None, False))
    for section in (weights, inputs):
        section.take("num_bits", (8,), 8)
        section.take("type", ("float",))
        section.take("symmetric", (True,), True)
    return partial(Fp8, static=static, blocks=blocks)


class Packed(Int4):
    """ "pack-quantized"; ``by_group``: the columns of a group are scattered."""

    def __init__(self, group_size: int, symmetric: bool, by_group: bool) -> None:
        super().__init__(group_size)
        self.symmetric, self.by_group = symmetric, by_group

    def leaves(self) -> set[str]:
        names = {"weight_packed", "weight_scale", "weight_shape"}
        names |= {"weight_g_idx"} if self.by_group else set()
        return names if self.symmetric else names | {"weight_zero_point"}

    def decode(self, tensors: Tensors, out_features: int, in_features: int) -> dict[str, torch.Tensor]:
        groups = self.groups(in_features)
        packed = shaped(tensors, "weight_packed", (out_features, -(-in_features // 8)), torch.int32)
        sizes = tensors["weight_shape"]
        if has_values(sizes) and sizes.tolist() != [out_features, in_features]:
            raise TensorError("weight_shape", f"is {sizes.tolist()}, expected {[out_features, in_features]}")
        if self.symmetric:
            zeros = torch.full((out_features, groups), float(ZERO), device=packed.device)
        else:
            points = shaped(tensors, "weight_zero_point", (-(-out_features // 8), groups), torch.int32)
            zeros = unpack(points.T)[:, :out_features].T.float()
        return {
            "codes": unpack(packed)[:, :in_features],
            "zeros": zeros,
            "scales": shaped(tensors, "weight_scale", (out_features, groups)).float(),
            "columns": self.columns(tensors, "weight_g_idx", in_features, packed.device),
        }
