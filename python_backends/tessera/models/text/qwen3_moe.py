"""Qwen3's decoder with experts in place of the feed-forward layers, or of some of them.

Source: transformers ``modeling_qwen3_moe.py``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from tessera.checkpoint.weights import Target
from tessera.kernels.operands import DeferredProduct
from tessera.kernels.tuning import layer_kernels
from tessera.linear.experts import Experts
from tessera.linear.scheme import Linear, Place, SchemeSelector
from tessera.linear.unquantized import Unquantized
from tessera.models.text.decoder import Qwen2, Qwen3Layer

if TYPE_CHECKING:
    from tessera.checkpoint.config import TextConfig


class Qwen3MoeLayer(Qwen3Layer):
    """``router`` says which experts each token sees; it is never quantized."""

    #: whether one tensor of all experts may also be [experts, in, out]
    either_way = False

    def __init__(
        self, config: TextConfig, index: int, schemes: SchemeSelector, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, index, schemes, dtype, device)
        assert config.experts is not None
        self._experts = config.experts if config.experts.at(index) else None
        if self._experts is None:
            return
        prefix = f"{self.prefix}mlp."
        every = config.hidden_size, self._experts, schemes, dtype, device, self.either_way
        self.gate_up, self.down = (Experts(f"{prefix}experts.", kind, *every) for kind in ("gate_up", "down"))
        rows = {f"{prefix}gate": slice(0, self._experts.num_experts)}
        self.router = Linear(config.hidden_size, rows, False, lambda modules: Unquantized(), dtype, device)

    def feed_forward(
        self, x: torch.Tensor | DeferredProduct, residual: torch.Tensor
    ) -> tuple[torch.Tensor | DeferredProduct, torch.Tensor]:
        if self._experts is None:
            return super().feed_forward(x, residual)
        assert isinstance(self.gate_up, Experts) and isinstance(self.down, Experts)
        normal, residual = self.post_norm(x, residual)
        assert isinstance(normal, torch.Tensor)
        kernels = layer_kernels(normal.device.type)
        logits = self.router(normal)
        routing = kernels.route(logits, self._experts.num_experts_per_tok, self._experts.norm_topk_prob)
        gated = kernels.grouped_gate_up(*self.gate_up.operands(normal), routing)
        return kernels.grouped_down(*self.down.operands(gated, routing), routing), residual

    def targets(self, stored: Collection[str]) -> dict[str, Target]:
        routers = {} if self._experts is None else self.router.targets(stored)
        return super().targets(stored) | routers

    def places(self) -> dict[Linear, Place]:
        """The router is left out: it is small, and runs as it is."""
        places = super().places()
        return places if self._experts is None else places | {self.gate_up: "experts", self.down: "experts"}


class Qwen3Moe(Qwen2):
    """Qwen3MoeForCausalLM."""

    layer_class = Qwen3MoeLayer
