"""Qwen2-VL's tower: patches of pictures of any size -> rows of the language model.

The rules are those of transformers ``modeling_qwen2_vl.py``. Two things are arranged for speed, neither of which
changes the result beyond rounding: a still picture would be all frames of a patch, so the kernel of the patch embedding
is summed over them; and pixel normalisation is folded into it, so that pixels travel as uint8.

Forwards of few patches as CUDA graphs: there the launches of some 300 kernels take longer than the kernels.

A graph is recorded for each of some numbers of patches. A smaller forward is filled up with what the buffers held
before, as pictures of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import cycle
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.weights import Target, copy_whole
from tessera.kernels.fp8_rows import Fp8Rows
from tessera.kernels.graphs import GraphPool
from tessera.kernels.operands import AttentionPlan, HopperPlan, filled_head, query_tiles
from tessera.kernels.tower_attention import Attend, VarlenAttention, attend_in_triton, attention_by, triton_configs
from tessera.kernels.tower_layers import PLAIN, Fp8Linear, TowerKernels, gpu_kernels, varlen_backends
from tessera.kernels.transfer import to_device
from tessera.kernels.tuning import MeasuredChoices, machine_of
from tessera.models.tower import MLP, Forward, Tower, TowerLayer, Wires, fold_normalisation

EPS = 1e-6  # of every norm
# Taken off the pixels, which 16-bit numbers hold either way: otherwise weights and bias would nearly cancel for the
# greys near the mean, and their own rounding to 16 bits would be larger than what is left.
_GREY = 128
# Patches of the large pictures that ways of attention are measured on: 896 pixels wide and high, in patches of 14.
_LARGE = 64**2
_SMALL = 32**2  # and of the one that graphs have theirs measured on
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

    def targets(self, prefix: str) -> dict[str, Target]:
        """What fills it, by names that begin with ``prefix``; the output's bias is as it is stored."""
        sides = ("qkv.weight", 0), ("qkv.bias", 0), ("output.weight", 1)
        return {prefix + name: partial(self.fill, self.get_parameter(name), side) for name, side in sides}

    def fill(self, weight: torch.Tensor, side: int, stored: torch.Tensor) -> None:
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


@dataclass(frozen=True)
class Reach:
    """Which patches see each other: those of a picture, or of a part of one. ``lengths``: how many these are in some,
    the largest first, to measure ways of attention on. ``least``: beside one part for each picture, there is at most
    one part for every ``least`` patches.
    """

    name: str
    lengths: Sequence[int]
    least: int | None = None


class Qwen2ViT(Tower):
    """uint8 groups of patches [n, merge, merge, side, side, 3] (RGB, 0..255), each picture's in reading order -> their
    rows [n, text hidden] of the weights' dtype. ``wires``: (1, height, width) of each picture, in patches.

    A relative may have other layers (``norm``, ``mlp``), or an attention that reaches less far in some of them:
    ``reaches``, which of them each layer has, and the groups in an ``order`` in which what sees each other lies
    together.
    """

    splits = False
    #: whether files have a bias of the patch embedding
    patch_bias = False
    #: whether the products in 16 bits apply the activation behind them, which is a GELU
    epilogue = False

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__()
        vision, text = config.vision, config.text
        size, side, self.merge = vision.embed_dim, vision.patch_size, vision.spatial_merge_size
        self.statistics, self.frames = (vision.pixel_mean, vision.pixel_std), vision.temporal_patch_size
        self.theta = vision.rope_theta
        self.unit_shape, self.row_shape = (self.merge, self.merge, side, side, 3), (1, text.row_size)
        self.batch_unit = max(1, 616 // (self.merge * side)) ** 2
        self.patch_embedding = nn.Linear(3 * side**2, size)
        nn.init.zeros_(self.patch_embedding.bias)  # which normalisation has in any case
        self.layers = nn.ModuleList(
            TowerLayer(partial(self.norm, size), Attention(size, vision.num_heads), self.mlp(config))
            for _ in range(vision.depth)
        )
        self.projector = Merger(size, self.merge**2, text.hidden_size)
        self.reaches = [Reach("pictures", (_LARGE, 100, 1000, 300))]
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

    def forward(self, pixels: torch.Tensor, wires: Wires = (), kernels: TowerKernels = PLAIN) -> torch.Tensor:
        order = self.order(wires, pixels.device)
        attends = [kernels.attend_within(lengths, pixels.device) for lengths in self.lengths(wires)]
        given = pixels if order is None else pixels[order[0]]
        rows = self.rows(given, self.places(wires, pixels.device), attends, kernels)
        return rows if order is None else rows[order[1]]

    def rows(
        self, pixels: torch.Tensor, places: Sequence[torch.Tensor], attends: Sequence[Attend], kernels: TowerKernels
    ) -> torch.Tensor:
        """:meth:`forward` with what follows from the pictures' sizes: groups and rows in their :meth:`order`,
        :meth:`places`, and attention within the :meth:`lengths` of each reach."""
        turns, *grid = places
        x, update = self.embed(pixels, *grid), None
        for layer, reach in zip(self.layers, self.reach_of_layers):
            x, update = layer(x, update, kernels, turns, attends[reach])
        return self.projector(x if update is None else x + update, kernels)

    def order(self, wires: Wires, device: torch.device) -> torch.Tensor | None:
        """int64 [2, groups]: which group comes at each place, and at which place each group's row is; None: as they
        are given."""
        return None

    def lengths(self, wires: Wires) -> list[list[int]]:
        """By reach: how many patches see each other, one after the other."""
        return [[height * width for _, height, width in wires]]

    def places(self, wires: Wires, device: torch.device) -> tuple[torch.Tensor, ...]:
        """What :meth:`rows` takes of where patches stand: :meth:`turns`, and what :meth:`embed` takes besides. Each
        one's last dimension but one counts patches."""
        return (self.turns(wires, device),)

    def grid(self, height: int, width: int) -> torch.Tensor:
        """Row and column of each patch of a picture, int32 [n, 2], in the :meth:`order` of its groups."""
        return places_of(height, width, self.merge)

    def embed(self, pixels: torch.Tensor) -> torch.Tensor:
        """Groups of patches -> the first layer's input [patches, hidden]."""
        values = pixels.to(self.patch_embedding.weight.dtype).sub_(_GREY)
        return self.patch_embedding(values.view(-1, self.patch_embedding.in_features))

    def turns(self, wires: Wires, device: torch.device) -> torch.Tensor:
        """Cosine and sine of the angles by which pairs of a head's values turn, float32 [2, patches, head size / 2]:
        the first half of the pairs turns with the patch's row in its picture, the second with its column.

        They also stretch queries and keys of heads that are filled up, so that a scale by their size is right again.
        """
        places = torch.cat([self.grid(height, width) for _, height, width in wires])
        size, stored = self.attention.head_size, self.attention.stored_size
        half = stored // 2
        speeds = self.theta ** (torch.arange(0, half, 2, device=device) / half)
        angles = (to_device(places, device)[:, :, None] / speeds).flatten(1)
        turns = torch.stack((angles.cos(), angles.sin()))
        return turns if size == stored else functional.pad(turns * (size / stored) ** 0.25, (0, (size - stored) // 2))

    @torch.inference_mode()
    def tuned(self, cost: int, choices: MeasuredChoices) -> Forward:
        """With the attention that is the fastest for pictures of one size, and for others, and so for each reach; in
        float32 torch's own."""
        attention, weight = self.attention, self.patch_embedding.weight
        if weight.itemsize > 2:
            return partial(self, kernels=gpu_kernels())

        heads, size, most = attention.heads, attention.head_size, cost * self.merge**2
        qkv = torch.randn(most, 3, heads, size, dtype=weight.dtype, device=weight.device)

        def fastest(what: str, lengths: Sequence[int], ways: Mapping[str, VarlenAttention]) -> str:
            query, key, value = qkv[: sum(lengths)].unbind(1)
            return choices.fastest(
                f"vision attention within {what}, {len(lengths)} of {len(query)} patches, {heads} heads of "
                f"{size}, {weight.dtype}, {machine_of(weight.device)}",
                {name: _call(way, lengths, query, key, value) for name, way in ways.items()},
            )

        def chosen_for(kind: str, reach: Reach, lengths: Sequence[int]) -> VarlenAttention:
            ways = varlen_backends(weight.device, kind == "equal")
            return ways[fastest(f"{kind} {reach.name}", lengths, ways)]

        chosen: dict[int, tuple[VarlenAttention, VarlenAttention]] = {}
        for reach in reversed(self.reaches):
            largest = reach.lengths[0]
            equal = chosen_for("equal", reach, [min(largest, most)] * max(1, most // largest))
            chosen[largest] = equal, chosen_for("mixed", reach, _mixed(reach.lengths, most))
        kernels = partial(gpu_kernels, epilogue=self.epilogue, fp8=isinstance(attention.output, Fp8Linear))
        forward = partial(self, kernels=kernels(within=partial(_by_kind, chosen)))
        small = (1, self.merge, self.merge)
        for wires in ([small], [small, (1, self.merge, 2 * self.merge)]):  # compiles what would hold up requests
            units = sum(height * width for _, height, width in wires) // self.merge**2
            forward(torch.zeros(units, *self.unit_shape, dtype=torch.uint8, device=weight.device), wires)
        sizes = [size for size in SIZES if size <= most]
        if not sizes:
            return forward
        plans, recorded = triton_configs(weight.device), []
        ways = {name: partial(attend_in_triton, plan=plan) for name, plan in plans.items()}
        for reach in self.reaches:
            length = min(_SMALL, reach.lengths[0], most)
            recorded.append(plans[fastest(f"single {reach.name}", [length] * (min(_SMALL, most) // length), ways)])
        return PatchGraphs(self, weight.device, sizes, recorded, kernels(), forward)

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

    def squares(self, draw: Callable[[tuple[int, ...]], torch.Tensor]) -> tuple[torch.Tensor, Wires]:
        count, (merge, _, side, _, _) = math.isqrt(self.batch_unit), self.unit_shape
        pictures = draw((count * merge * side,) * 2 + (3,)).unflatten(2, (count, merge, side))
        groups = pictures.unflatten(1, (count, merge, side)).permute(0, 1, 4, 2, 5, 3, 6, 7).flatten(0, 2)
        return groups, [(1, count * merge, count * merge)] * len(pictures)

    def fp8_linears(self) -> dict[str, nn.Linear]:
        linears = {name: module for name, module in self.named_modules() if isinstance(module, nn.Linear)}
        del linears["patch_embedding"]
        return linears

    def targets(self, stored: Set[str]) -> dict[str, Target]:
        targets = super().targets(stored)
        if not self.patch_bias:
            del targets["patch_embedding.bias"]
        targets["patch_embedding.weight"] = self._sum_frames
        for index, layer in enumerate(self.layers):
            targets |= cast(TowerLayer, layer).attention.targets(f"layers.{index}.attention.")
        return targets

    def _sum_frames(self, stored: torch.Tensor) -> None:
        kernel = torch.empty(self.patch_embedding.out_features, 3, self.frames, *self.unit_shape[2:4])
        copy_whole(kernel, stored)
        self.patch_embedding.weight.copy_(kernel.sum(2).permute(0, 2, 3, 1).flatten(1))

    def finish_loading(self) -> None:
        mean, std = self.statistics
        fold_normalisation(self.patch_embedding, [value - _GREY / 255 for value in mean], std)


@lru_cache(maxsize=32)
def places_of(height: int, width: int, merge: int) -> torch.Tensor:
    """Row and column of each patch of a picture of height x width patches, in the order of its groups: int32 [n, 2]."""
    grid = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), dim=-1)
    groups = grid.view(height // merge, merge, width // merge, merge, 2).transpose(1, 2)
    return groups.reshape(-1, 2).to(torch.int32)


def _mixed(sizes: Sequence[int], count: int) -> list[int]:
    """The patches of pictures of several ``sizes``, ``count`` altogether."""
    lengths: list[int] = []
    for size in cycle(sizes):
        if not count:
            return lengths
        lengths.append(min(size, count))
        count -= lengths[-1]
    raise AssertionError("a cycle ends")


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


#: patches of a forward that is worth a graph: beyond them an H200's kernels take longer than a host's launches
SIZES = (256, 512, 1024, 1536, 2048, 3072, 4096)
_PICTURES = 64  # of a graph's forward: each may end in the middle of a tile of queries


class PatchGraphs:
    """A tower's forward; used by one thread at a time.

    ``kernels`` are those of the recorded forwards, whose attention is ours by ``plans``, one for each of the tower's
    reaches; ``otherwise`` is the forward of more patches than the largest of ``sizes``, or of more small pictures. On
    the CPU a replay computes.
    """

    def __init__(
        self,
        tower: Qwen2ViT,
        device: torch.device,
        sizes: Sequence[int],
        plans: Sequence[AttentionPlan | HopperPlan],
        kernels: TowerKernels,
        otherwise: Forward,
    ) -> None:
        self._tower, self._kernels, self._otherwise = tower, kernels, otherwise
        self._reaches = list(zip(plans, tower.reaches, strict=True))
        self._graphs = GraphPool("vision graphs", sizes, self._compute, device)
        self._group, largest = tower.merge**2, self._graphs.sizes[-1]
        self._pixels = torch.zeros(largest // self._group, *tower.unit_shape, dtype=torch.uint8, device=device)
        squares = {size: [(1, tower.merge, size // tower.merge)] for size in self._graphs.sizes}
        self._places = {size: tower.places(wires, device) for size, wires in squares.items()}
        rooms = [self._room(plan, reach, largest) for plan, reach in self._reaches]
        self._tiles = [torch.zeros(room, 3, dtype=torch.int32, device=device) for room in rooms]
        self._graphs.record(partial(self._cut, [[] for _ in rooms]))

    def __call__(self, pixels: torch.Tensor, wires: Wires) -> torch.Tensor:
        """Rows that are the caller's to keep."""
        patches = len(pixels) * self._group
        if patches > self._graphs.sizes[-1] or len(wires) > _PICTURES:
            return self._otherwise(pixels, wires)
        size, order = self._graphs.size_for(patches), self._tower.order(wires, pixels.device)
        self._cut(self._tower.lengths(wires), size)
        self._pixels[: len(pixels)].copy_(pixels if order is None else pixels[order[0]])
        for held, given in zip(self._places[size], self._tower.places(wires, pixels.device)):
            held[..., :patches, :].copy_(given)
        rows = self._graphs.replay(size)[: len(pixels)]
        return rows.clone() if order is None else rows[order[1]]

    def _compute(self, size: int) -> torch.Tensor:
        attends = []
        for (plan, reach), tiles in zip(self._reaches, self._tiles):
            tiles = tiles[: self._room(plan, reach, size)]
            attends.append(partial(attention_by(plan), tiles=tiles, plan=plan))
        return self._tower.rows(self._pixels[: size // self._group], self._places[size], attends, self._kernels)

    def _room(self, plan: AttentionPlan | HopperPlan, reach: Reach, size: int) -> int:
        """Tiles of a forward of ``size`` patches at most."""
        return size // plan.rows + (size // reach.least if reach.least else 0) + _PICTURES + 1

    def _cut(self, lengths: Sequence[Sequence[int]], size: int) -> None:
        """The tiles of pictures of such ``lengths``, by reach; what fills them up to ``size`` is cut into pictures of
        one tile, which cost the least, and whose rows are numbers whatever lay in memory."""
        for (plan, reach), tiles, within in zip(self._reaches, self._tiles, lengths):
            full, rest = divmod(size - sum(within), plan.rows)
            cut = query_tiles([*within, *[plan.rows] * full, *[rest] * bool(rest)], plan.rows)
            tiles[: len(cut)].copy_(to_device(cut, tiles.device))
            tiles[len(cut) : self._room(plan, reach, size)] = 0
