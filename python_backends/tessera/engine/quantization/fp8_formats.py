"""FP8 checkpoints other than compressed-tensors': scales of 128 x 128 blocks, and ModelOpt's."""

from __future__ import annotations

from functools import partial

from tessera.engine.quantization.fp8 import BLOCK, Fp8
from tessera.engine.quantization.settings import Groups, Settings


def read_blocks(settings: Settings) -> Groups:
    """quant_method "fp8": the weight is multiplied by ``weight_scale_inv`` [out / 128, in / 128], despite its name."""
    settings.take("weight_block_size", ([BLOCK, BLOCK],))
    settings.take("activation_scheme", ("dynamic",), "dynamic")
    settings.take("fmt", ("e4m3",), "e4m3")
    settings.take("dequantize", (False,), False)
    return [(["Linear"], partial(Fp8, "weight_scale_inv", blocks=True))]


def read_modelopt(settings: Settings) -> Groups:
    """quant_method "modelopt": one ``weight_scale`` and one ``input_scale`` a module."""
    settings.take("quant_algo", ("FP8",))
    settings.take("kv_cache_quant_algo", (None,))
    settings.take("kv_cache_scheme", (None,))
    settings.drop("producer", "config_groups", "quant_method", "version")  # the groups say the same at length
    return [(["Linear"], partial(Fp8, static=True))]
