"""Qwen2-VL's tower: patches of pictures of any size -> rows of the language model.

The rules are those of transformers ``modeling_qwen2_vl.py``. Two things are arranged for speed, neither of which
changes the result beyond rounding: a still picture would be all frames of a patch, so the kernel of the patch embedding
is summed over them; and pixel normalisation is folded into it, so that pixels travel as uint8.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache, partial
from itertools import cycle
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.weights import Target, copy_whole
from tessera.kernels.fixed_rows import fixed
from tessera.kernels.fp8_rows import Fp8Rows
from tessera.kernels.operands import AttentionPlan, HopperPlan, filled_head
from tessera.kernels.tower_attention import Attend, VarlenAttention, attend_in_triton, fixed_plan, triton_configs
from tessera.kernels.tower_layers import PLAIN, Fp8Linear, TowerKernels, gpu_kernels, varlen_backends
from tessera.kernels.transfer import to_device
from tessera.kernels.tuning import MeasuredChoices, machine_of
from tessera.models.qwen2_vl.patch_tower import LARGE_SIZES, SIZES, PatchGraphs, PatchTower, places_of
from tessera.models.tower import MLP, Forward, TowerLayer, Wires, fold_normalisation

EPS = 1e-6  # of every norm
# Taken off the pixels, which 16-bit numbers hold either way: otherwise weights and bias would nearly cancel for the
# greys near the mean, and their own rounding to 16 bits would be larger than what is left.
_GREY = 128
_SMALL = 32**2  # patches of the picture that graphs have their way of attention measured on
_PLACE = 8  # bytes of a patch's row and column


class Attention(nn.Module):
    """Self-attention within each picture; queries and keys are turned by their patch's row and column.

    A head of a size that no kernel takes is filled up with zeros while loading: in either half of its values, as value
    i turns with value i + size / 2.
    """

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads, self.stored_size = heads, size // heads
        self.head_size = filled_head(self.stored_size)
        self.qkv = nn.Linear(size, 3 * heads * self.head_size)
        self.output = nn.Linear(heads * self.head_size, size)

    def forward(
        self, x: torch.Tensor | Fp8Rows, kernels: TowerKernels, turns: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """x [patches, hidden] -> the same; ``turns`` as :meth:`Qwen2ViT.turns` gives them."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        return self.output(attend(*kernels.layers.apply_rotary(qkv, turns)))

    def targets(self, prefix: str, apart: bool) -> dict[str, Target]:
        """What fills it, by names that begin with ``prefix``; ``apart``: q, k and v are stored so, not as one. The
        output's bias is as it is stored."""
        targets: dict[str, Target] = {f"{prefix}output.weight": partial(self._fill, self.output.weight, 1)}
        for leaf, whole in self.qkv.named_parameters():
            parts = dict(zip(("q_proj", "k_proj", "v_proj"), whole.chunk(3))) if apart else {"qkv": whole}
            targets |= {f"{prefix}{name}.{leaf}": partial(self._fill, rows, 0) for name, rows in parts.items()}
        return targets

    def _fill(self, weight: torch.Tensor, side: int, stored: torch.Tensor) -> None:
        """``side``: the dimension along which the heads lie."""
        parts = weight.zero_().unflatten(side, (-1, self.head_size // 2)).narrow(side + 1, 0, self.stored_size // 2)
        whole = torch.empty_like(parts.flatten(side, side + 1))
        copy_whole(whole, stored)
        parts.copy_(whole.view(parts.shape))


class Merger(MLP):
    """LayerNorm of each patch, or of a whole group; then a group's patches side by side through Linear, GELU, Linear to
    the text's width."""

    norm: nn.LayerNorm | nn.RMSNorm

    def __init__(self, size: int, group: int, text_size: int, whole: bool = False) -> None:
        super().__init__(size * group, size * group, text_size, "gelu")
        self.norm = nn.LayerNorm(size * group if whole else size, eps=EPS)

    def forward(self, x: Any, kernels: TowerKernels = PLAIN) -> torch.Tensor:
        """Patches [n * group, hidden] -> rows [n, text hidden]."""
        normed = self.norm(x.view(-1, *self.norm.normalized_shape))
        return super().forward(normed.view(-1, self.linear1.in_features), kernels)


class Qwen2ViT(PatchTower):
    """Patch embedding, layers, projector. A relative may have other layers (``norm``, ``mlp``), or more reaches: of
    them each layer has one (``reach_of_layers``)."""

    #: whether files have a bias of the patch embedding, and q, k and v apart
    patch_bias = qkv_apart = False
    #: whether the products in 16 bits apply the activation behind them, which is a GELU
    epilogue = False

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__(config)
        vision, size = config.vision, config.vision.embed_dim
        self.statistics = vision.pixel_mean, vision.pixel_std
        self.frames: tuple[int, ...] = (vision.temporal_patch_size,)  # the dimension of kernels that counts them
        self.theta = vision.rope_theta
        self.patch_embedding = nn.Linear(3 * vision.patch_size**2, size)
        nn.init.zeros_(self.patch_embedding.bias)  # which normalisation has in any case
        self.layers = nn.ModuleList(
            TowerLayer(partial(self.norm, size), Attention(size, vision.num_heads), self.mlp(config))
            for _ in range(vision.depth)
        )
        self.projector = Merger(size, self.merge**2, config.text.hidden_size)
        self.reach_of_layers = [0] * vision.depth

    def norm(self, size: int) -> nn.LayerNorm | nn.RMSNorm:
        """A layer's."""
        return nn.LayerNorm(size, eps=EPS)

    def mlp(self, config: CheckpointConfig) -> nn.Module:
        """A layer's, whose last linear layer is called linear2."""
        vision = config.vision
        return MLP(vision.embed_dim, vision.inner_size, vision.embed_dim, vision.hidden_act)

    @property
    def attention(self) -> Attention:
        """The first layer's; the others' are alike."""
        return cast(TowerLayer, self.layers[0]).attention

    def rows(
        self, pixels: torch.Tensor, places: Sequence[torch.Tensor], attends: Sequence[Attend], kernels: TowerKernels
    ) -> torch.Tensor:
        turns, *grid = places
        x, update = self.embed(pixels, *grid), None
        for layer, reach in zip(self.layers, self.reach_of_layers):
            x, update = layer(x, update, kernels, turns, attends[reach])
        return self.projector(x if update is None else x + update, kernels)

    def places(self, wires: Wires, device: torch.device) -> tuple[torch.Tensor, ...]:
        """:meth:`turns`, and what :meth:`embed` takes besides."""
        return (self.turns(wires, device),)

    def grid(self, height: int, width: int, *kept: bytes) -> torch.Tensor:
        """Row and column of each patch of a picture, int32 [n, 2], in the order of its groups."""
        return places_of(height, width, self.merge, *kept)

    def embed(self, pixels: torch.Tensor) -> torch.Tensor:
        """Groups of patches -> the first layer's input [patches, hidden]."""
        values = pixels.to(self.patch_embedding.weight.dtype).sub_(_GREY)
        return self.patch_embedding(values.view(-1, self.patch_embedding.in_features))

    def turns(self, wires: Wires, device: torch.device) -> torch.Tensor:
        """Cosine and sine of the angles by which pairs of a head's values turn, float32 [2, patches, head size / 2]:
        the first half of the pairs turns with the patch's row in its picture, the second with its column.

        They also stretch queries and keys of heads that are filled up, so that a scale by their size is right again.
        """
        places = torch.cat([self.grid(height, width, *kept) for _, height, width, *kept in wires])
        size, stored = self.attention.head_size, self.attention.stored_size
        half = stored // 2
        speeds = self.theta ** (torch.arange(0, half, 2, device=device) / half)
        angles = (to_device(places, device)[:, :, None] / speeds).flatten(1)
        turns = torch.stack((angles.cos(), angles.sin()))
        return turns if size == stored else functional.pad(turns * (size / stored) ** 0.25, (0, (size - stored) // 2))

    @torch.inference_mode()
    def tuned(self, cost: int, choices: MeasuredChoices | None, graph_bytes: float = math.inf) -> Forward:
        """With the attention that is the fastest for pictures of one size, and for others, and so for each reach, or
        ours for all; in float32 torch's own."""
        attention, weight = self.attention, self.patch_embedding.weight
        if weight.itemsize > 2:
            return partial(self, kernels=gpu_kernels())

        heads, size, most = attention.heads, attention.head_size, cost * self.merge**2
        if choices is None:
            plan = fixed_plan(weight.device)
            alike, within = [plan] * len(self.reaches), partial(attend_in_triton, plan=plan)
            return self._with_graphs(most, within, alike, alike, graph_bytes)
        qkv = torch.randn(most, 3, heads, size, dtype=weight.dtype, device=weight.device)

        def fastest(what: str, lengths: Sequence[int], ways: Mapping[str, VarlenAttention]) -> str:
            query, key, value = qkv[: sum(lengths)].unbind(1)
            return choices.fastest(
                f"vision attention within {what}, {len(lengths)} of {len(query)} patches, {heads} heads of "
                f"{size}, {weight.dtype}, {machine_of(weight.device)}",
                {name: _call(way, lengths, query, key, value) for name, way in ways.items()},
            )

        plans = triton_configs(weight.device)
        ours = {name: partial(attend_in_triton, plan=plan) for name, plan in plans.items()}
        equal, mixed = varlen_backends(weight.device, True), varlen_backends(weight.device, False)
        chosen: dict[int, tuple[VarlenAttention, VarlenAttention]] = {}
        small, large = list[AttentionPlan | HopperPlan](), list[AttentionPlan | HopperPlan]()
        for reach in reversed(self.reaches):
            largest, length = reach.lengths[0], min(_SMALL, reach.lengths[0], most)
            of_equal = fastest(f"equal {reach.name}", [min(largest, most)] * max(1, most // largest), equal)
            of_mixed = fastest(f"mixed {reach.name}", _mixed(reach.lengths, most), mixed)
            chosen[largest] = equal[of_equal], mixed[of_mixed]
            if of_mixed in plans:
                large.insert(0, plans[of_mixed])
            if most >= SIZES[0]:
                single = fastest(f"single {reach.name}", [length] * (min(_SMALL, most) // length), ours)
                small.insert(0, plans[single])
        return self._with_graphs(most, partial(_by_kind, chosen), small, large, graph_bytes)

    def _with_graphs(
        self,
        most: int,
        within: VarlenAttention,
        small: Sequence[AttentionPlan | HopperPlan],
        large: Sequence[AttentionPlan | HopperPlan],
        graph_bytes: float,
    ) -> Forward:
        """The forward of up to ``most`` patches with this attention, where some sizes are graphs, whose plans are those
        for each reach in ``small`` forwards, and in ``large`` ones. There are none of large ones where ours is not the
        fastest within every reach; they have twins that leave room."""
        device, fp8 = self.patch_embedding.weight.device, isinstance(self.attention.output, Fp8Linear)
        kernels = partial(gpu_kernels, epilogue=self.epilogue and not fixed(), fp8=fp8)
        forward: Forward = partial(self, kernels=kernels(within=within))
        group = (1, self.merge, self.merge)
        for wires in ([group], [group, (1, self.merge, 2 * self.merge)]):  # compiles what would hold up requests
            units = sum(height * width for _, height, width in wires) // self.merge**2
            forward(torch.zeros(units, *self.unit_shape, dtype=torch.uint8, device=device), wires)
        of_size, beside = self.activation_bytes, None
        sizes = [size for size in LARGE_SIZES if size <= most and of_size(size // self.merge**2) <= graph_bytes]
        if sizes and len(large) == len(self.reaches):
            forward = beside = PatchGraphs(self, device, sizes, large, kernels(), forward, twins=True)
        sizes = [size for size in SIZES if size <= most]
        return PatchGraphs(self, device, sizes, small, kernels(), forward, beside=beside) if sizes else forward

    def activation_bytes(self, cost: int, scores: bool = False) -> int:
        """With PLAIN kernels: in proportion to the patches, however they are spread over pictures.

        The most is held in a layer, beside its input, its update, their sum and that normed: in the MLP (its inner rows
        three times), where heads turn (q, k and v; in float32 q, k, halves and results), in the attention (q, k and v,
        the turned q and k, rows apart and joined, and three for copies that torch's kernel may want); or where the
        pixels are wide. Not counted are what the allocator rounds up and the scratch memory of matrix products.
        """
        layer, value = cast(TowerLayer, self.layers[0]), self.patch_embedding.weight.itemsize
        hidden, inner, patches = layer.mlp.linear2.out_features, layer.mlp.linear2.in_features, cost * self.merge**2
        heads = layer.attention.heads * layer.attention.head_size
        largest = max(
            (4 * hidden + 3 * inner) * value,
            7 * heads * value + (4 if value == 4 else 6) * heads * 4,
            14 * heads * value,
            (self.patch_embedding.in_features + 2 * hidden) * value,
        )
        written = 2 * layer.attention.heads * patches * value if scores else 0
        return patches * (largest + written + 4 * layer.attention.head_size + _PLACE)

    def fp8_linears(self) -> dict[str, nn.Linear]:
        linears = {name: module for name, module in self.named_modules() if isinstance(module, nn.Linear)}
        del linears["patch_embedding"]
        return linears

    def targets(self, stored: Set[str]) -> dict[str, Target]:
        targets = {name: target for name, target in super().targets(stored).items() if ".attention.qkv." not in name}
        if not self.patch_bias:
            del targets["patch_embedding.bias"]
        targets["patch_embedding.weight"] = self._sum_frames
        for index, layer in enumerate(self.layers):
            targets |= cast(TowerLayer, layer).attention.targets(f"layers.{index}.attention.", self.qkv_apart)
        return targets

    def _sum_frames(self, stored: torch.Tensor) -> None:
        kernel = torch.empty(self.patch_embedding.out_features, 3, *self.frames, *self.unit_shape[2:4])
        copy_whole(kernel, stored)
        still = kernel.sum(2) if self.frames else kernel
        self.patch_embedding.weight.copy_(still.permute(0, 2, 3, 1).flatten(1))

    def finish_loading(self) -> None:
        mean, std = self.statistics
        fold_normalisation(self.patch_embedding, [value - _GREY / 255 for value in mean], std)


def _mixed(sizes: Sequence[int], count: int) -> list[int]:
    """The patches of pictures of several ``sizes``, ``count`` altogether."""
    lengths, again = list[int](), cycle(sizes)
    while count:
        lengths.append(min(next(again), count))
        count -= lengths[-1]
    return lengths


def _by_kind(
    chosen: Mapping[int, tuple[VarlenAttention, VarlenAttention]], lengths: Sequence[int], device: torch.device
) -> Attend:
    """By what was ``chosen`` for equal and for other lengths, by the most patches that each is for, in ascending order;
    the last is for longer ones too."""
    *_, last = chosen
    equal, mixed = chosen[next((most for most in chosen if max(lengths) <= most), last)]
    return (equal if len(set(lengths)) == 1 else mixed)(lengths, device)


def _call(
    way: VarlenAttention, lengths: Sequence[int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """The way's attention alone, without what is made once for all layers; a way that cannot do it raises at a call."""
    attend = cache(partial(way, lengths, query.device))
    return lambda: attend()(query, key, value)
