"""The decoders that are Qwen2's but for their names, the order of stored rows, or a norm.

Qwen3, the dense one: queries and keys are normalised head by head. Source: transformers ``modeling_qwen3.py``.

InternLM2: Llama's decoder under other names, with q, k and v stored as one grouped matrix. Source: the checkpoints'
``modeling_internlm2.py``.

Phi-3: Llama's decoder whose q, k and v, and gate and up, are stored as one matrix each. Source: transformers
``modeling_phi3.py``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from tessera.attention.backend import HeadShape
from tessera.checkpoint.weights import Target
from tessera.kernels.operands import Unfinished, finished
from tessera.kernels.tuning import layer_kernels
from tessera.linear.scheme import Rows, SchemeSelector
from tessera.linear.unquantized import RmsNorm
from tessera.models.text.qwen2 import DecoderLayer, LayerNames, Qwen2, norm_targets

if TYPE_CHECKING:
    from tessera.checkpoint.config import TextConfig


class Qwen3Layer(DecoderLayer):
    """``q_norm`` and ``k_norm`` [head_dim] are shared by all heads."""

    def __init__(
        self, config: TextConfig, index: int, schemes: SchemeSelector, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, index, schemes, dtype, device)
        self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps, dtype, device)
        self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps, dtype, device)
        self._kv_heads, self._eps = config.num_key_value_heads, config.rms_norm_eps

    def heads(self, qkv: torch.Tensor | Unfinished) -> torch.Tensor:
        """Normalises the heads of q and k in ``qkv`` itself."""
        qkv = finished(qkv)
        weights = self.q_norm.get_buffer("weight"), self.k_norm.get_buffer("weight")
        layer_kernels(qkv.device.type).norm_heads(qkv, *weights, self._kv_heads, self._eps)
        return qkv

    def targets(self, stored: Collection[str]) -> dict[str, Target]:
        norms = {"self_attn.q_norm": self.q_norm, "self_attn.k_norm": self.k_norm}
        return super().targets(stored) | norm_targets({self.prefix + name: norm for name, norm in norms.items()})


class Qwen3(Qwen2):
    """Qwen3ForCausalLM."""

    layer_class = Qwen3Layer


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
