"""The decoder shared by Qwen2 and Llama: they differ only in biases and rotary scaling, which the config states.

Sources: transformers ``modeling_qwen2.py``, ``modeling_llama.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from tessera.engine.attention.backend import AttentionBackend, AttentionStep, HeadShape
from tessera.engine.layers.embedding import Embedding
from tessera.engine.layers.norm import RmsNorm
from tessera.engine.layers.rotary import Rotary
from tessera.engine.quantization.scheme import Linear, SchemeSelector, Target, copy_whole
from tessera.errors import CheckpointError

if TYPE_CHECKING:
    from tessera.checkpoint.config import TextConfig


_HEAD_MULTIPLE = 16


@dataclass(frozen=True)
class LayerNames:
    """A checkpoint's names inside one layer."""

    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    output: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"


class DecoderLayer(nn.Module):
    """Attention and feed-forward, both after a norm and onto the residual stream."""

    def __init__(
        self, config: TextConfig, index: int, schemes: SchemeSelector, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.index = index

        def linear(name: str, size: int, parts: dict[str, int], bias: bool) -> Linear:
            return Linear(size, parts, bias, schemes(f"model.layers.{index}.{name}"), dtype, device)

        def norm() -> RmsNorm:
            return RmsNorm(hidden, config.rms_norm_eps, dtype, device)

        qkv_parts = {"q": queries, "k": keys, "v": keys}
        self.input_norm, self.post_norm = norm(), norm()
        self.qkv = linear("self_attn.q_proj", hidden, qkv_parts, config.attention_bias)
        self.output = linear("self_attn.o_proj", queries, {"o": hidden}, config.output_bias)
        self.gate_up = linear("mlp.gate_proj", hidden, {"gate": inner, "up": inner}, config.mlp_bias)
        self.down = linear("mlp.down_proj", inner, {"down": hidden}, config.mlp_bias)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, attention: AttentionBackend, step: AttentionStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_norm(x, residual)
        x = attention.attend(self.index, self.qkv(x), step)
        if step.rows is not None:
            residual = residual[step.rows]
        x, residual = self.post_norm(self.output(x), residual)
        return self.down(self.gate_up.gated(x)), residual


class Qwen2(nn.Module):
    """Token ids and picture rows in, hidden rows and logits out; covers Qwen2ForCausalLM and LlamaForCausalLM."""

    names = LayerNames()
    embedding_name = "model.embed_tokens.weight"
    head_name = "lm_head"

    def __init__(self, config: TextConfig, schemes: SchemeSelector, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise CheckpointError(f"hidden_act {config.hidden_act!r} of the text model is not supported; only silu is")
        self.config = config
        self.heads = HeadShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.rotary = Rotary(
            config.head_dim,
            config.rope_theta,
            config.rope_scaling,
            config.max_position_embeddings,
            device,
            config.mrope_section,
        )
        # Matrix units want whole tiles: the head's rows are padded, and what they give is cut off.
        padded = -(-config.vocab_size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
        self.embedding = Embedding(padded, config.hidden_size, dtype, device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, schemes, dtype, device) for index in range(config.num_hidden_layers)
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.head: Linear | None = None
        if not config.tie_word_embeddings:
            parts = {"head": config.vocab_size, "padding": padded - config.vocab_size}
            self.head = Linear(config.hidden_size, parts, False, schemes(self.head_name), dtype, device)

    def forward(
        self,
        ids: torch.Tensor,
        image_index: torch.Tensor | None,
        image_rows: torch.Tensor | None,
        attention: AttentionBackend,
        step: AttentionStep,
        last_step: AttentionStep,
    ) -> torch.Tensor:
        """ids int64 [n] -> normalised hidden rows [m, hidden] for the rows ``last_step`` keeps.

        The last layer runs past its keys and values only for those rows.
        """
        x, residual = self.embedding(ids, image_index, image_rows), None
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, attention, step)
        x, residual = self.layers[-1](x, residual, attention, last_step)
        return self.norm(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, hidden] -> [m, vocabulary] of the model's dtype."""
        rows = F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)  # type: ignore[arg-type]
        return rows[:, : self.config.vocab_size]

    def weight_targets(self) -> dict[str, Target]:
        """Where each tensor of the checkpoint goes, by its exact name; a wrong shape raises CheckpointError there."""
        targets: dict[str, Target] = {
            self.embedding_name: partial(copy_whole, self.embedding.get_buffer("weight")[: self.config.vocab_size]),
            "model.norm.weight": partial(copy_whole, self.norm.get_buffer("weight")),
        }
        if self.head is not None:
            targets |= self.head.targets(self.head_name, "head")
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            targets |= self._layer_targets(f"model.layers.{layer.index}", layer)
        return targets

    def _layer_targets(self, prefix: str, layer: DecoderLayer) -> dict[str, Target]:
        names = self.names
        return {
            f"{prefix}.{names.input_norm}.weight": partial(copy_whole, layer.input_norm.get_buffer("weight")),
            f"{prefix}.{names.post_norm}.weight": partial(copy_whole, layer.post_norm.get_buffer("weight")),
            **self._qkv_targets(prefix, layer),
            **layer.output.targets(f"{prefix}.{names.output}", "o"),
            **layer.gate_up.targets(f"{prefix}.{names.gate}", "gate"),
            **layer.gate_up.targets(f"{prefix}.{names.up}", "up"),
            **layer.down.targets(f"{prefix}.{names.down}", "down"),
        }

    def _qkv_targets(self, prefix: str, layer: DecoderLayer) -> dict[str, Target]:
        targets: dict[str, Target] = {}
        for part in ("q", "k", "v"):
            targets |= layer.qkv.targets(f"{prefix}.self_attn.{part}_proj", part)
        return targets
