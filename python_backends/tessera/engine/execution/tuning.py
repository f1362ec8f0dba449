"""Which kernels a model uses on this GPU: measured on its own weights and shapes before the first request.

Two kinds of questions are asked. For each shape of linear layer, its scheme asks which product is the fastest for how
many rows. And for prompts that begin in a step: from what length on is torch's attention faster than ours?
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tessera import fp8
from tessera.engine import kernels
from tessera.engine.attention.backend import AttentionBackend, AttentionStep, SpanTable
from tessera.engine.attention.triton_backend import TritonBackend
from tessera.engine.models.qwen2 import DecoderLayer, Qwen2
from tessera.engine.quantization import in_place, measured
from tessera.engine.quantization.scheme import Linear, LinearShape, Place
from tessera.measured_choices import MeasuredChoices, choices_path, graph_milliseconds

_LENGTHS = (512, 1024, 2048, 4096)
_STEP_TOKENS = 8192


def tune(model: Qwen2, attention: AttentionBackend, device: torch.device, most_rows: int) -> None:
    """Lets the layers' schemes choose and sets the triton backend's ``whole_from``, on a GPU.

    ``most_rows``: of a step. The cache has left the memory of such a step free, and no layer takes more by itself.
    """
    choices = MeasuredChoices(choices_path(), graph_milliseconds)
    machine = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, kernels {kernels_version()}"
    for shape, layers in layers_alike(model):
        layers[0].scheme.tune(layers, replace(shape, most_rows=most_rows), choices, machine)
    if isinstance(attention, TritonBackend) and not attention.storage.fp8:
        tune_prefill(attention, choices, machine)


def kernels_version() -> str:
    """Eight digits that change with the text of our kernels, and of how they are measured."""
    files = [file for package in (kernels, fp8) for file in sorted(Path(str(package.__file__)).parent.glob("*.py"))]
    files += [Path(str(module.__file__)) for module in (in_place, measured)]
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=4).hexdigest()


def layers_alike(model: Qwen2) -> list[tuple[LinearShape, list[Linear]]]:
    """The layers that have the same choices, which are of one shape, and hold the same kind of weights.

    Of one shape only some may be packed, have scattered columns, or still have found room for an FP8 copy.
    """
    places: dict[nn.Module, Place] = {}
    for layer in model.layers:
        if isinstance(layer, DecoderLayer):
            places |= {layer.qkv: "qkv", layer.output: "output", layer.gate_up: "gate_up", layer.down: "down"}
    groups: dict[tuple[LinearShape, str, tuple[str, ...]], list[Linear]] = defaultdict(list)
    for layer in model.modules():
        if isinstance(layer, Linear):
            place = places.get(layer, "alone")
            shape = LinearShape(layer.out_features, layer.in_features, layer.has_bias, place, layer.dtype)
            groups[shape, layer.scheme.in_words(layer), layer.held].append(layer)
    return [(shape, layers) for (shape, *_), layers in groups.items()]


def tune_prefill(backend: TritonBackend, choices: MeasuredChoices, machine: str) -> None:
    """Finds the shortest of some lengths from which on torch's attention wins at every length."""
    shape, keys = backend.shape, backend.storage.keys[0]
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    whole_from = None
    for length in reversed([length for length in _LENGTHS if length <= len(keys) * backend.storage.block_size]):
        prompts = max(1, min(_STEP_TOKENS, len(keys) * backend.storage.block_size) // length)
        tokens = prompts * length
        qkv = torch.randn(tokens, width, dtype=keys.dtype, device=keys.device)
        angles = torch.zeros(tokens, shape.head_dim // 2, device=keys.device)
        nowhere = torch.full((tokens,), -1, dtype=torch.int64, device=keys.device)
        table = _equal_prompts(prompts, length, backend.storage.block_size)
        ways = {}
        for name, backend.whole_from in (("triton", None), ("sdpa", length)):
            step = AttentionStep(angles, angles, nowhere, None, backend.plan(table))
            ways[name] = partial(backend.attend, 0, qkv, step)
        question = (
            f"attention, {prompts} prompts of {length}, {shape.heads} x {shape.head_dim} over {shape.kv_heads} heads, "
            f"{keys.dtype}, {machine}"
        )
        if choices.fastest(question, ways) != "sdpa":
            break
        whole_from = length
    backend.whole_from = whole_from


def _equal_prompts(prompts: int, length: int, block_size: int) -> SpanTable:
    """Whole prompts of one length, each on blocks of its own."""
    each = -(-length // block_size)
    lengths = np.full(prompts, length, np.int64)
    blocks = np.arange(prompts * each, dtype=np.int64).reshape(prompts, each)
    return SpanTable(np.arange(prompts) * length, lengths, lengths, blocks)
