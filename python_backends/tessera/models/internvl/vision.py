"""InternViT, pixel shuffle and projector: tiles of pixels -> rows of the language model.

The rules are those of transformers ``modeling_internvl.py`` and OpenGVLab ``modeling_intern_vit.py`` and
``modeling_internvl_chat.py``. Four things are arranged for speed, none of which changes the result beyond
rounding: pixel normalisation is folded into the patch embedding and layer scale into the projections before it,
q, k and v are one matrix, and the patches are taken in the order of the pixel shuffle, so that the shuffle itself
is a reshape.
"""

import math
from collections.abc import Callable, Set
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.weights import Target, copy_whole
from tessera.kernels.fp8_rows import Fp8Rows
from tessera.kernels.tower_attention import fixed_attention
from tessera.kernels.tower_layers import ATTENTIONS, GELUS, PLAIN, Fp8Linear, TowerKernels, gpu_kernels
from tessera.kernels.tuning import MeasuredChoices, machine_of
from tessera.models.internvl.config import VisionConfig
from tessera.models.tower import MLP, Forward, Tower, TowerLayer, Wires, fold_normalisation


def _norm(config: VisionConfig) -> nn.Module:
    if config.norm_type == "rms_norm":
        return nn.RMSNorm(config.hidden_size, config.layer_norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class Attention(nn.Module):
    """Self-attention with one qkv matrix; q/k norm, where it is on, spans all heads together."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.qkv = nn.Linear(size, 3 * size, bias=config.attention_bias)
        self.output = nn.Linear(size, size)
        self.q_norm = nn.RMSNorm(size, config.qk_norm_eps) if config.use_qk_norm else None
        self.k_norm = nn.RMSNorm(size, config.qk_norm_eps) if config.use_qk_norm else None

    def forward(self, x: torch.Tensor | Fp8Rows, kernels: TowerKernels = PLAIN) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        split = (self.heads, query.shape[-1] // self.heads)
        return self.mix(query.unflatten(-1, split), key.unflatten(-1, split), value.unflatten(-1, split), kernels)

    def mix(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernels: TowerKernels = PLAIN
    ) -> torch.Tensor:
        """Each [n, tokens, heads, head size] -> [n, tokens, hidden]."""
        return self.output(kernels.attend(query, key, value))


class Layer(TowerLayer):
    """As transformers' with both ``scale``s folded, which :meth:`forward` takes for granted."""

    def __init__(self, config: VisionConfig) -> None:
        size = config.hidden_size
        mlp = MLP(size, config.intermediate_size, size, config.hidden_act)
        super().__init__(partial(_norm, config), Attention(config), mlp)
        self.scale1: nn.Parameter | None = nn.Parameter(torch.ones(size))
        self.scale2: nn.Parameter | None = nn.Parameter(torch.ones(size))

    @torch.no_grad()
    def fold_scales(self) -> None:
        """Multiply both layer scales into the matrices before them."""
        for scale, linear in ((self.scale1, self.attention.output), (self.scale2, self.mlp.linear2)):
            if scale is not None:
                linear.weight.mul_(scale[:, None])
                linear.bias.mul_(scale)
        self.scale1 = self.scale2 = None


class Projector(MLP):
    """``mlp1``: LayerNorm, Linear, activation, Linear, from shuffled patches to the text model's width."""

    def __init__(self, size: int, text_size: int, activation: str) -> None:
        super().__init__(size, text_size, text_size, activation)
        self.norm = nn.LayerNorm(size)

    def forward(self, x: torch.Tensor | Fp8Rows, kernels: TowerKernels = PLAIN) -> torch.Tensor:
        return super().forward(self.norm(x), kernels)


class InternViT(Tower):
    """uint8 tiles [n, side, side, 3] (RGB, 0..255) -> rows [n * tokens per tile, text hidden] of the weights' dtype.

    A fresh instance has initial values as torch gives them; ``load_tower`` fills one from a checkpoint.
    """

    onnx_graph = "tessera.models.internvl.onnx_graph:vision_graph"

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__()
        vision = config.vision
        self.patch = vision.patch_size
        self.statistics = vision.pixel_mean, vision.pixel_std
        self.normed = vision.feature_layer == -1
        self.merge = round(1 / vision.downsample_ratio)
        self.grid = vision.patches_per_side // self.merge
        self.transposed = vision.ps_version == "v1"
        # How many layers run: hidden state k is the input of layer k, the last one the output of the last layer.
        self.depth = vision.feature_layer % (vision.num_hidden_layers + 1)
        self.patch_embedding = nn.Linear(vision.num_channels * vision.patch_size**2, vision.hidden_size)
        self.class_embedding = nn.Parameter(torch.zeros(1, 1, vision.hidden_size))
        self.position_embedding = nn.Parameter(torch.zeros(1, vision.patches_per_side**2 + 1, vision.hidden_size))
        self.layers = nn.ModuleList(Layer(vision) for _ in range(vision.num_hidden_layers))
        self.final_norm = nn.LayerNorm(vision.hidden_size, eps=vision.layer_norm_eps) if vision.final_norm else None
        self.projector = Projector(
            vision.hidden_size * self.merge**2, config.text.hidden_size, vision.projector_hidden_act
        )
        self.unit_shape = (vision.image_size, vision.image_size, vision.num_channels)
        self.row_shape = (self.grid**2, config.text.row_size)

    @property
    def blocks(self) -> list[Layer]:
        return cast("list[Layer]", list(self.layers))

    def forward(self, pixels: torch.Tensor, wires: Wires = (), kernels: TowerKernels = PLAIN) -> torch.Tensor:
        x, update = self.embed(pixels), None
        for layer in self.blocks[: self.depth]:
            x, update = layer(x, update, kernels)
        x = x[:, 1:] if update is None else x[:, 1:] + update[:, 1:]  # the class row has served
        if self.final_norm is not None and self.normed:
            x = self.final_norm(x)
        merged = x.reshape(-1, self.grid**2, self.projector.norm.normalized_shape[0])
        return self.projector(merged, kernels).flatten(0, 1)

    def embed(self, tiles: torch.Tensor) -> torch.Tensor:
        """Tiles -> the first layer's input [n, 1 + patches, hidden], the class row first."""
        side = (self.grid, self.merge, self.patch)
        blocks = tiles.reshape(-1, *side, *side, tiles.shape[-1])
        order = (0, 4, 1, 2, 5, 3, 6, 7) if self.transposed else (0, 1, 4, 2, 5, 3, 6, 7)
        # Reordered and converted at once; 0..255 are numbers of every floating dtype.
        values = blocks.permute(order).to(self.patch_embedding.weight.dtype, memory_format=torch.contiguous_format)
        patches = self.patch_embedding(values.flatten(5).flatten(1, 4))
        x = patches.new_empty(len(patches), 1 + patches.shape[1], patches.shape[2])
        x[:, :1] = self.class_embedding + self.position_embedding[:, :1]
        torch.add(patches, self.position_embedding[:, 1:], out=x[:, 1:])
        return x

    def activation_bytes(self, cost: int, scores: bool = False) -> int:
        """With PLAIN kernels.

        The most is held in a layer's MLP (five tensors as wide as the residual stream, and its inner rows twice, or
        three times while the CPU quantizes them), in
        its attention (eleven: q, k and v twice, where torch's kernel wants copies of its own; scores before and after
        the softmax), or where the pixels or the rows are wide. Not counted are what the allocator rounds up (at most
        1 MiB a tensor) and the scratch memory of matrix products.
        """
        mlp, projector = self.blocks[0].mlp.linear1, self.projector.linear2
        tokens, hidden = self.position_embedding.shape[1:]
        pixels = math.prod(self.unit_shape)
        attention = 11 * tokens * hidden + (2 * self.blocks[0].attention.heads * tokens**2 if scores else 0)
        largest = max(
            tokens * (5 * hidden + (3 if isinstance(mlp, Fp8Linear) else 2) * mlp.out_features),
            attention,
            2 * tokens * hidden + 3 * self.grid**2 * projector.out_features,
            pixels + 2 * tokens * hidden,
        )
        return cost * (2 * pixels + largest * self.class_embedding.itemsize)

    def in_patch_order(self, patches: torch.Tensor) -> torch.Tensor:
        """[patches, ...], row-major -> the same in the order in which forward takes them."""
        square = patches.unflatten(0, (self.grid, self.merge, self.grid, self.merge))
        order = (2, 0, 1, 3) if self.transposed else (0, 2, 1, 3)
        return square.permute(*order, *range(4, square.dim())).flatten(0, 3)

    def targets(self, stored: Set[str]) -> dict[str, Target]:
        targets = super().targets(stored)
        arranged = {
            "patch_embedding.weight": lambda kernel: kernel.permute(0, 2, 3, 1).flatten(1),  # channels last
            "class_embedding": lambda row: row.reshape(1, 1, -1),
            "position_embedding": self._arrange_positions,
        }
        for name, arrange in arranged.items():
            targets[name] = partial(_arranged, arrange, targets[name])
        for name, whole in self.state_dict().items():
            parts = [name.replace(".qkv.", f".{part}_proj.") for part in "qkv"]
            if parts[0] != name and not stored.isdisjoint(parts):  # stored as three
                del targets[name]
                targets |= {part: partial(copy_whole, rows) for part, rows in zip(parts, whole.chunk(3))}
        return targets

    def _arrange_positions(self, stored: torch.Tensor) -> torch.Tensor:
        fitted = _fit_positions(stored.float(), self.grid * self.merge)
        arranged = torch.empty(fitted.shape)  # cat and empty_like import a second's worth of torch where it is meta
        arranged[0, 0], arranged[0, 1:] = fitted[0, 0], self.in_patch_order(fitted[0, 1:])
        return arranged

    @torch.no_grad()
    def finish_loading(self) -> None:
        """Fold pixel normalisation into the patch embedding, and the layer scales."""
        fold_normalisation(self.patch_embedding, *self.statistics)
        for layer in self.blocks:
            layer.fold_scales()

    def fp8_linears(self) -> dict[str, nn.Linear]:
        names = ("attention.qkv", "attention.output", "mlp.linear1", "mlp.linear2")
        inner = [f"layers.{number}.{name}" for number in range(self.depth) for name in names]
        every = [*inner, "projector.linear1", "projector.linear2"]
        return {name: cast(nn.Linear, self.get_submodule(name)) for name in every}

    @torch.inference_mode()
    def tuned(self, cost: int, choices: MeasuredChoices | None, graph_bytes: float = math.inf) -> Forward:
        """With the kernels measured on the tower's own weights and shapes, or ours; in float32 there is no choice.

        Of a tower in FP8 only the attention is measured.
        """
        layer, weight = self.blocks[0], self.class_embedding
        if weight.itemsize > 2:
            return partial(self, kernels=gpu_kernels())
        attention, mlp = layer.attention, layer.mlp
        tokens, width, heads = self.position_embedding.shape[1], weight.shape[-1], attention.heads
        fp8 = isinstance(attention.output, Fp8Linear)
        if choices is None:
            alone = fixed_attention(cost, tokens, weight.device)
            return partial(self, kernels=replace(gpu_kernels(fp8=fp8), attend=alone))
        machine = machine_of(weight.device)
        x = torch.randn(cost, tokens, width, dtype=weight.dtype, device=weight.device)
        query, key, value = attention.qkv(x).unflatten(-1, (3, heads, width // heads)).unbind(2)
        every = {name: gpu_kernels(name, fp8=fp8) for name in ATTENTIONS}
        backend = choices.fastest(  # with the layer after it, in front of which FP8 quantizes
            f"vision attention and output{' in fp8' * fp8}, {cost} x {tokens}, {heads} heads of {width // heads}, "
            f"{weight.dtype}, {machine}",
            {name: partial(attention.mix, query, key, value, kernels) for name, kernels in every.items()},
        )
        if fp8:
            return partial(self, kernels=gpu_kernels(backend, fp8=True))
        epilogue = False
        if mlp.activation_name in GELUS:
            shape = f"{mlp.linear1.out_features} x {width}, {cost * tokens} rows"
            ways = {"apart": gpu_kernels(), "epilogue": gpu_kernels(epilogue=True)}
            given = x, mlp.linear1, mlp.activation_name
            chosen = choices.fastest(
                f"vision linear + {mlp.activation_name}, {shape}, {weight.dtype}, {machine}",
                {name: partial(kernels.linear_and_activate, *given) for name, kernels in ways.items()},
            )
            epilogue = chosen == "epilogue"
        return partial(self, kernels=gpu_kernels(backend, epilogue=epilogue))


def _arranged(arrange: Callable[[torch.Tensor], torch.Tensor], target: Target, tensor: torch.Tensor) -> None:
    target(arrange(tensor))


def _fit_positions(stored: torch.Tensor, side: int) -> torch.Tensor:
    """Position embeddings [1, 1 + stored side ^ 2, hidden], resized as the reference does if the grid differs."""
    stored_side = int((stored.shape[1] - 1) ** 0.5)
    if stored_side == side:
        return stored
    square = stored[:, 1:].unflatten(1, (stored_side, stored_side)).permute(0, 3, 1, 2)
    square = functional.interpolate(square, size=(side, side), mode="bicubic", align_corners=False)
    return torch.cat((stored[:, :1], square.permute(0, 2, 3, 1).flatten(1, 2)), dim=1)
