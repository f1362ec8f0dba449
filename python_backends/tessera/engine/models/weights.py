"""Fills a model from named tensors: every name once, none left over, every shape as expected."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tessera.engine.models.qwen2 import Qwen2
from tessera.engine.quantization.scheme import Linear
from tessera.errors import CheckpointError

_SHOWN = 10


def load_weights(model: Qwen2, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fills ``model``. Raises CheckpointError naming missing, left-over, repeated or misshapen weights."""
    targets = model.weight_targets()
    missing = dict.fromkeys(targets)
    faults: list[str] = []
    for name, tensor in tensors:
        if name not in missing:
            faults.append(f"{name}: {'given twice' if name in targets else 'left over'}")
            continue
        del missing[name]
        try:
            targets[name](tensor)
        except CheckpointError as error:
            faults.append(f"{name}: {error}")
    faults += [f"{name}: missing" for name in missing]
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError(f"weights of the text model: {'; '.join(faults[:_SHOWN])}{more}")
    _finish(model)


def randomize(model: Qwen2, seed: int) -> None:
    """Fills ``model`` as if loaded from a checkpoint of small random numbers (norms: one)."""
    for name, buffer in model.named_buffers():
        generator = torch.Generator(buffer.device).manual_seed(seed)
        seed += 1
        if name.endswith("norm.weight"):
            buffer.fill_(1)
        else:
            buffer.normal_(0, 0.02, generator=generator)
    _finish(model)


def _finish(model: Qwen2) -> None:
    for module in model.modules():
        if isinstance(module, Linear):
            module.scheme.finish(module)
