"""The decoder shared by Qwen2 and Llama: they differ only in biases and rotary scaling, which the config states.

Phi-3's is the same, with its weights stored as fewer matrices. Behind it those with another norm or order of stored
rows. Sources: transformers ``modeling_qwen2.py``, ``modeling_llama.py``, ``modeling_phi3.py``, ``modeling_qwen3.py``;
InternLM2's checkpoints' own ``modeling_internlm2.py``.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from tessera.attention.backend import AttentionBackend, AttentionStep, HeadShape
from tessera.checkpoint.config import TextConfig
from tessera.checkpoint.weights import Target, copy_whole
from tessera.kernels.operands import DeferredProduct, HeadNorms
from tessera.linear.scheme import Linear, Place, Rows, SchemeSelector, stacked
from tessera.linear.unquantized import Embedding, RmsNorm
from tessera.models.text.rotary import Rotary

_HEAD_MULTIPLE = 16

#: x and residual [n, hidden] between two layers; x may be deferred; no residual yet: None
Stream = tuple[torch.Tensor | DeferredProduct, torch.Tensor | None]


class DecoderLayer(nn.Module):
    """Attention and feed-forward, both after a norm and onto the residual stream."""

    #: whether queries and keys are normalised head by head; all heads share ``q_norm`` and ``k_norm`` [head_dim]
    norms_heads = False

    def __init__(
        self, config: TextConfig, index: int, schemes: SchemeSelector, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        self.index, self.names = index, config.names
        self.prefix = f"model.layers.{index}."

        def linear(size: int, modules: Mapping[str, Rows], bias: bool) -> Linear:
            named = {self.prefix + name: rows for name, rows in modules.items()}
            return Linear(size, named, bias, schemes, dtype, device)

        def norm(size: int = hidden) -> RmsNorm:
            return RmsNorm(size, config.rms_norm_eps, dtype, device)

        self.input_norm, self.post_norm, self._eps = norm(), norm(), config.rms_norm_eps
        if self.norms_heads:
            self.q_norm, self.k_norm = norm(config.head_dim), norm(config.head_dim)
        self.qkv = linear(hidden, self.qkv_modules(head_shape(config)), config.attention_bias)
        self.output = linear(queries, stacked([self.names.output], [hidden]), config.output_bias)
        self.gate_up = linear(hidden, stacked(self.names.gate_up, [inner, inner]), config.mlp_bias)
        self.down = linear(inner, stacked([self.names.down], [hidden]), config.mlp_bias)

    def qkv_modules(self, heads: HeadShape) -> dict[str, Rows]:
        """The stored modules of q, k and v, and which rows of them all (q above k above v) they are."""
        sizes = [count * heads.head_dim for count in (heads.heads, heads.kv_heads, heads.kv_heads)]
        return stacked(self.names.qkv, sizes)

    def forward(
        self,
        x: torch.Tensor | DeferredProduct,
        residual: torch.Tensor | None,
        attention: AttentionBackend,
        step: AttentionStep,
    ) -> tuple[torch.Tensor | DeferredProduct, torch.Tensor]:
        """x and residual [n, hidden] -> the same behind this layer; x may be deferred."""
        rows = len(x) if isinstance(x, torch.Tensor) else x.rows
        normal, residual = self.input_norm(x, residual, self.qkv.wants_fp8_input(rows), self.qkv.normalises(rows))
        attended = attention.attend(self.index, self.qkv.deferred(normal), step, self.head_norms)
        if step.rows is not None:
            residual = residual[step.rows]
        return self.feed_forward(self.output.deferred(attended), residual)

    def feed_forward(
        self, x: torch.Tensor | DeferredProduct, residual: torch.Tensor
    ) -> tuple[torch.Tensor | DeferredProduct, torch.Tensor]:
        """The attention's output and what it is added to -> the same behind the MLP."""
        rows = len(residual)
        wanted = self.gate_up.wants_fp8_input(rows), self.gate_up.normalises(rows)
        normal, residual = self.post_norm(x, residual, *wanted)
        return self.down.deferred(self.gate_up.gated(normal, self.down.wants_fp8_input(rows))), residual

    @property
    def head_norms(self) -> HeadNorms | None:
        """Those of q and k, where the model has any."""
        if not self.norms_heads:
            return None
        return HeadNorms(self.q_norm.get_buffer("weight"), self.k_norm.get_buffer("weight"), self._eps)

    def targets(self, stored: Collection[str]) -> dict[str, Target]:
        """As :meth:`Qwen2.targets`, for this layer."""
        norms = {self.names.input_norm: self.input_norm, self.names.post_norm: self.post_norm}
        if self.norms_heads:
            norms |= {"self_attn.q_norm": self.q_norm, "self_attn.k_norm": self.k_norm}
        targets = norm_targets({self.prefix + name: norm for name, norm in norms.items()})
        for linear in self.places():
            targets |= linear.targets(stored)
        return targets

    def places(self) -> dict[Linear, Place]:
        """The linear layers, and where they stand."""
        return {self.qkv: "qkv", self.output: "output", self.gate_up: "gate_up", self.down: "down"}


class Qwen2(nn.Module):
    """Embedding, layers and head; covers Qwen2ForCausalLM, LlamaForCausalLM and Phi3ForCausalLM."""

    layer_class: type[DecoderLayer] = DecoderLayer

    def __init__(self, config: TextConfig, schemes: SchemeSelector, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.heads = head_shape(config)
        self.rotary = Rotary(config, device)
        # Matrix units want whole tiles: the head's rows are padded, and what they give is cut off.
        padded = -(-config.vocab_size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
        self.embedding = Embedding(padded, config.hidden_size, config.row_size, dtype, device)
        self.layers = nn.ModuleList(
            self.layer_class(config, index, schemes, dtype, device) for index in range(config.num_hidden_layers)
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.head: Linear | None = None
        if not config.tie_word_embeddings:
            modules = stacked([config.names.head], [config.vocab_size])
            self.head = Linear(config.hidden_size, modules, False, schemes, dtype, device, out_features=padded)

    def forward_layers(
        self, x: torch.Tensor, attention: AttentionBackend, step: AttentionStep, last_step: AttentionStep
    ) -> torch.Tensor:
        """Embedded tokens [n, hidden], which may be overwritten -> normalised hidden rows [m, hidden] for the rows
        ``last_step`` keeps.

        The last layer runs past its keys and values only for those rows.
        """
        stream: Stream = x, None
        for layer in self.layers[:-1]:
            stream = layer(*stream, attention, step)
        return self.norm(*self.layers[-1](*stream, attention, last_step))[0]

    def places(self, with_head: bool = True) -> dict[Linear, Place]:
        """As :meth:`DecoderLayer.places`, of all layers and the head."""
        layers = cast("list[DecoderLayer]", list(self.layers))
        places = {linear: place for layer in layers for linear, place in layer.places().items()}
        return places if self.head is None or not with_head else {**places, self.head: "alone"}

    @property
    def products_a_token(self) -> int:
        """Multiplications by weights that the layers take for one token."""
        return sum(linear.products_a_token for linear in self.places(with_head=False))

    def describe_weights(self) -> str:
        """What the layers' weights are, for people."""
        return " and ".join(sorted({linear.scheme.in_words(linear) for linear in self.places(with_head=False)}))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, hidden] -> [m, vocabulary] of the model's dtype."""
        rows = F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)  # type: ignore[arg-type]
        return rows[:, : self.config.vocab_size]

    def targets(self, stored: Collection[str]) -> dict[str, Target]:
        """What fills the model, by the checkpoint's names; ``stored``: those that it has."""
        name, embedding = f"model.{self.config.names.embedding}.weight", self.embedding.get_buffer("weight")
        targets: dict[str, Target] = {
            name: partial(copy_whole, embedding[: self.config.vocab_size]),
            **norm_targets({"model.norm": self.norm}),
        }
        if self.head is not None:
            targets |= self.head.targets(stored)
        for layer in self.layers:
            targets |= cast(DecoderLayer, layer).targets(stored)
        return targets

    def randomize(self, seed: int) -> None:
        """Fills the model as if from a checkpoint of small random numbers (norms: one)."""
        embedding = self.embedding.get_buffer("weight")
        generator = torch.Generator(embedding.device).manual_seed(seed)
        embedding.normal_(0, 0.02, generator=generator)
        for module in self.modules():
            if isinstance(module, Linear):
                module.randomize(generator)
            elif isinstance(module, RmsNorm):
                module.get_buffer("weight").fill_(1)


def head_shape(config: TextConfig) -> HeadShape:
    return HeadShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)


def norm_targets(norms: Mapping[str, RmsNorm]) -> dict[str, Target]:
    """What fills norms, which are given by name."""
    return {f"{name}.weight": partial(copy_whole, norm.get_buffer("weight")) for name, norm in norms.items()}


class Qwen3Layer(DecoderLayer):
    norms_heads = True


class Qwen3(Qwen2):
    """Qwen3ForCausalLM."""

    layer_class = Qwen3Layer


class InternLM2Layer(DecoderLayer):
    """q, k and v are stored as one grouped matrix."""

    def qkv_modules(self, heads: HeadShape) -> dict[str, Rows]:
        """wqkv's rows are grouped by key head: the group's queries, then its key, then its value."""
        queries, keys = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
        rows = torch.arange(queries + 2 * keys).split([queries, keys, keys])
        grouped = [part.view(heads.kv_heads, -1, heads.head_dim) for part in rows]
        return {self.names.qkv[0]: torch.cat(grouped, dim=1).flatten()}


class InternLM2(Qwen2):
    """InternLM2ForCausalLM."""

    layer_class = InternLM2Layer
