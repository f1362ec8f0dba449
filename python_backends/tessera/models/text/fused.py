"""InternLM2: the same decoder as Llama under other names, with q, k and v stored as one grouped matrix.

Source: the checkpoints' ``modeling_internlm2.py``.

Phi-3: Llama's decoder whose q, k and v, and gate and up, are stored as one matrix each.

Source: transformers ``modeling_phi3.py``. Its longrope is ``layers/rotary.py``'s.
"""

from __future__ import annotations

import torch

from tessera.attention.backend import HeadShape
from tessera.linear.scheme import Rows
from tessera.models.text.qwen2 import DecoderLayer, LayerNames, Qwen2


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


class Phi3Layer(DecoderLayer):
    """The rows of the stored matrices are in the order of ours."""

    names = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


class Phi3(Qwen2):
    """Phi3ForCausalLM."""

    layer_class = Phi3Layer
