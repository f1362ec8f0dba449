"""InternLM2: the same decoder as Llama under other names, with q, k and v stored as one grouped matrix.

Source: the checkpoints' ``modeling_internlm2.py``. Rows of wqkv are grouped by key head: queries, key, value.
"""

from __future__ import annotations

from functools import partial

import torch

from tessera.engine.models.qwen2 import DecoderLayer, LayerNames, Qwen2
from tessera.engine.quantization.scheme import Linear, Target
from tessera.errors import CheckpointError


class InternLM2(Qwen2):
    """InternLM2ForCausalLM: w1 is the gate, w3 up, w2 down."""

    names = LayerNames(
        input_norm="attention_norm",
        post_norm="ffn_norm",
        output="attention.wo",
        gate="feed_forward.w1",
        up="feed_forward.w3",
        down="feed_forward.w2",
    )
    embedding_name = "model.tok_embeddings.weight"
    head_name = "output"

    def _qkv_targets(self, prefix: str, layer: DecoderLayer) -> dict[str, Target]:
        names = layer.qkv.scheme.tensor_names(layer.qkv)
        return {f"{prefix}.attention.wqkv.{name}": partial(self._load_qkv, layer.qkv, name) for name in names}

    def _load_qkv(self, qkv: Linear, name: str, tensor: torch.Tensor) -> None:
        for part, rows in self._split(tensor).items():
            qkv.scheme.load(qkv, part, name, rows)

    def _split(self, fused: torch.Tensor) -> dict[str, torch.Tensor]:
        """wqkv's rows are grouped by key head: the group's queries, then its key, then its value."""
        shape = self.heads
        per_group = shape.heads // shape.kv_heads + 2
        expected = shape.kv_heads * per_group * shape.head_dim
        if len(fused) != expected:
            raise CheckpointError(f"{len(fused)} rows, expected {expected}")
        groups = fused.unflatten(0, (shape.kv_heads, per_group, shape.head_dim))
        parts = {"q": groups[:, :-2], "k": groups[:, -2:-1], "v": groups[:, -1:]}
        return {name: rows.flatten(0, 2) for name, rows in parts.items()}
