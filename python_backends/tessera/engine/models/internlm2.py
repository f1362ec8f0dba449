"""InternLM2: the same decoder as Llama under other names, with q, k and v stored as one grouped matrix.

Source: the checkpoints' ``modeling_internlm2.py``.
"""

from __future__ import annotations

import torch

from tessera.engine.attention.backend import HeadShape
from tessera.engine.models.qwen2 import DecoderLayer, LayerNames, Qwen2
from tessera.engine.quantization.scheme import Rows


class InternLM2Layer(DecoderLayer):
    """w1 is the gate, w3 up, w2 down."""

    names = LayerNames(
        input_norm="attention_norm",
        post_norm="ffn_norm",
        qkv=("attention.wqkv",),
        output="attention.wo",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
    )

    def qkv_modules(self, heads: HeadShape) -> dict[str, Rows]:
        """wqkv's rows are grouped by key head: the group's queries, then its key, then its value."""
        queries, keys = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
        rows = torch.arange(queries + 2 * keys).split([queries, keys, keys])
        grouped = [part.view(heads.kv_heads, -1, heads.head_dim) for part in rows]
        return {self.names.qkv[0]: torch.cat(grouped, dim=1).flatten()}


class InternLM2(Qwen2):
    """InternLM2ForCausalLM."""

    layer_class = InternLM2Layer
    embedding_name = "model.tok_embeddings.weight"
    head_name = "output"
