"""Qwen3, the dense one: Qwen2's decoder whose queries and keys are normalised head by head.

Source: transformers ``modeling_qwen3.py``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from tessera.checkpoint.weights import Target
from tessera.kernels.deferred import Unfinished, finished
from tessera.kernels.tuning import layer_kernels
from tessera.linear.layers import RmsNorm
from tessera.linear.scheme import SchemeSelector
from tessera.models.text.qwen2 import DecoderLayer, Qwen2, norm_targets

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
