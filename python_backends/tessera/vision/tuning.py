"""Which kernels a tower uses on this GPU: measured on its own weights and shapes, for each number of tiles."""

from __future__ import annotations

from functools import partial

import torch

from tessera.measured_choices import MeasuredChoices
from tessera.vision.attention import BACKENDS, attend
from tessera.vision.intern_vit import InternViT
from tessera.vision.tower_kernels import (
    GELUS,
    TowerKernels,
    gpu_kernels,
    linear_and_activate_in_place,
    linear_with_epilogue,
)


@torch.inference_mode()
def fastest_kernels(tower: InternViT, tiles: int, choices: MeasuredChoices) -> TowerKernels:
    """The kernels for forwards of ``tiles`` tiles of a tower that is on a GPU; in float32 there is no choice."""
    layer, weight = tower.blocks[0], tower.class_embedding
    if weight.itemsize > 2:
        return gpu_kernels("default", epilogue=False)
    attention, mlp = layer.attention, layer.mlp
    tokens, width, heads = tower.position_embedding.shape[1], weight.shape[-1], attention.heads
    machine = f"{torch.cuda.get_device_name(weight.device)}, torch {torch.__version__}"
    x = torch.randn(tiles, tokens, width, dtype=weight.dtype, device=weight.device)

    query, key, value = attention.qkv(x).unflatten(-1, (3, heads, width // heads)).unbind(2)
    backend = choices.fastest(
        f"vision attention, {tiles} x {tokens}, {heads} heads of {width // heads}, {weight.dtype}, {machine}",
        {name: partial(attend, query, key, value, backend=BACKENDS.get(name)) for name in ("default", *BACKENDS)},
    )
    epilogue = False
    if mlp.activation_name in GELUS:
        question = f"vision linear + {mlp.activation_name}, {mlp.linear1.out_features} x {width}, {tiles * tokens} rows"
        ways = {"apart": linear_and_activate_in_place, "epilogue": linear_with_epilogue}
        chosen = choices.fastest(
            f"{question}, {weight.dtype}, {machine}",
            {name: partial(way, x, mlp.linear1, mlp.activation_name) for name, way in ways.items()},
        )
        epilogue = chosen == "epilogue"
    return gpu_kernels(backend, epilogue)
