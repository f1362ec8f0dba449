"""What the stage needs of a vision tower, what towers are made of, and how one is filled from a checkpoint."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from hashlib import blake2b
from pkgutil import resolve_name
from typing import Any

import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.weights import SafetensorsFolder, SafetensorsHeaders, Target, copy_whole, fill, split_names
from tessera.errors import CheckpointError, ConfigError
from tessera.kernels.fp8_rows import Fp8Rows
from tessera.kernels.tower_layers import PLAIN, TowerKernels
from tessera.kernels.tuning import MeasuredChoices
from tessera.models.registry import spec_of

#: as a tower's ``forward``
Forward = Callable[..., torch.Tensor]
#: each picture's ImagePlan.told: (t, h, w) of tensor PLAN, and the groups that are kept where some are left out
Wires = Sequence[tuple[int, int, int] | tuple[int, int, int, bytes]]


#: how the names of linear layers end that are parts of one here, and that one's
_STORED_APART = {r"[qkv]_proj$": "qkv", r"(?:gate|up)_proj$": "gate_up"}


class Tower(torch.nn.Module):
    """The pixels of pictures -> rows of the language model; made from a CheckpointConfig, which is its one argument.

    Cost counts what the family's plans count: tiles, or patches. A subclass sets these:
    """

    #: whether a picture's units are independent of each other, so that a forward may take any of them
    splits: bool = True
    #: the cost that the setting ``infer_batch_size`` counts as one
    batch_unit: int = 1
    #: "module:function" that writes it as an ONNX graph, if there is one
    onnx_graph: str | None = None
    #: uint8 shape of the pixels of one unit of cost
    unit_shape: tuple[int, ...]
    #: (rows that one unit of cost becomes at most, values of a row)
    row_shape: tuple[int, int]

    def forward(self, pixels: torch.Tensor, wires: Wires = ()) -> torch.Tensor:
        """uint8 [cost, *unit_shape], picture after picture -> rows [rows, hidden] of the weights' dtype.

        No wires where the tower ``splits``.
        """
        raise NotImplementedError

    @property
    def weight_bytes(self) -> int:
        """What the weights take, quantized ones as well; they need not be filled."""
        return sum(weight.nbytes for weight in (*self.parameters(), *self.buffers()))

    def activation_bytes(self, cost: int, scores: bool = False) -> int:
        """The most memory that a forward takes at a time, its rows included; ``scores``: attention writes its own.

        Those in bfloat16 on a CPU, 8 MiB a thread, are not counted.
        """
        raise NotImplementedError

    def tuned(self, cost: int, choices: MeasuredChoices | None, graph_bytes: float = math.inf) -> Forward:
        """The forward for so much, in a tower that does not split for up to that, with what is the fastest on its GPU;
        without ``choices`` with what gives a picture the same bits whatever it is beside. Of large forwards only those
        are recorded as graphs that take no more than ``graph_bytes``.

        Without wires where the tower splits.
        """
        return self

    def squares(self, draw: Callable[[tuple[int, ...]], torch.Tensor]) -> tuple[torch.Tensor, Wires]:
        """``forward``'s arguments for some square pictures; ``draw``: (side, side, 3) -> uint8 [n, side, side, 3]."""
        return draw(self.unit_shape), ()

    def fp8_linears(self) -> dict[str, torch.nn.Linear]:
        """Module name -> the linear layers that FP8 may take the place of. Raises ConfigError where there are none."""
        raise ConfigError(f"{type(self).__name__} does not run in FP8: set quantization to checkpoint or fp8-language")

    def targets(self, stored: Set[str]) -> dict[str, Target]:
        """What fills the tower, by our names of the weights; ``stored``: those that the checkpoint has."""
        return {name: partial(copy_whole, value) for name, value in self.state_dict().items()}

    def finish_loading(self) -> None:
        """Called once when all float32 weights are there."""


class MLP(torch.nn.Module):
    def __init__(self, size: int, inner: int, out: int, activation: str) -> None:
        super().__init__()
        self.activation_name = activation
        self.linear1 = torch.nn.Linear(size, inner)
        self.linear2 = torch.nn.Linear(inner, out)

    def forward(self, x: torch.Tensor | Fp8Rows, kernels: TowerKernels = PLAIN) -> torch.Tensor:
        return self.linear2(kernels.linear_and_activate(x, self.linear1, self.activation_name))


class TowerLayer(torch.nn.Module):
    """One block: x + attention(norm1(x)), then x + mlp(norm2(x)).

    The last addition is left to what comes next, so that one kernel can add and normalise.
    """

    attention: Any
    mlp: Any

    def __init__(self, norm: Callable[[], torch.nn.Module], attention: torch.nn.Module, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.norm1 = norm()
        self.attention = attention
        self.norm2 = norm()
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, update: torch.Tensor | None = None, kernels: TowerKernels = PLAIN, *within: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and what is still to be added to it -> the same after this layer, all [..., hidden].

        ``within``: what this layer's attention takes besides; a tower may give each of its layers another.
        """
        normed, x = kernels.add_and_norm(x, update, self.norm1)
        normed, x = kernels.add_and_norm(x, self.attention(normed, kernels, *within), self.norm2)
        return x, self.mlp(normed, kernels)


@torch.no_grad()
def fold_normalisation(embedding: torch.nn.Linear, mean: Sequence[float], std: Sequence[float]) -> None:
    """Has a layer that takes (x / 255 - mean) / std, channels last, take x in 0..255 instead."""
    means, stds = (torch.tensor(values, dtype=torch.float64) for values in (mean, std))
    wide = embedding.weight.double().unflatten(1, (-1, len(stds))) / stds
    embedding.bias.copy_(embedding.bias.double() - (wide * means).sum((1, 2)))
    embedding.weight.copy_(wide.flatten(1) / 255)


def tower_class(config: CheckpointConfig) -> type[Tower]:
    """The vision tower of a checkpoint's family."""
    return resolve_name(spec_of(config.raw, config.folder).vision_tower)


def onnx_writer(config: CheckpointConfig) -> Callable[..., Any]:
    """(tower, fingerprint) -> onnx.ModelProto. Raises ConfigError for a tower that has no graph."""
    place = tower_class(config).onnx_graph
    if place is None:
        raise ConfigError(f"the vision tower of model_type {config.model_type!r} has no ONNX graph: it runs in torch")
    return resolve_name(place)


def load_tower(config: CheckpointConfig, dtype: torch.dtype = torch.float32, random_weights: bool = False) -> Any:
    """The vision tower of a checkpoint on the CPU, ready to run, weights in ``dtype``.

    ``random_weights`` draws them from a fixed seed instead (benchmarks on folders without weights).
    Raises CheckpointError for weights that are missing, left over or of a wrong shape.
    """
    tower = tower_class(config)(config).requires_grad_(False).eval()
    if random_weights:
        _draw(tower)
    else:
        _fill(tower, SafetensorsFolder(config.folder), config)
    tower.finish_loading()
    return tower.to(dtype)


def check_tower(config: CheckpointConfig) -> Tower:
    """The tower's shapes, which the checkpoint's weights fit, as far as the headers of its files tell.

    Raises CheckpointError as :func:`load_tower` does.
    """
    with torch.device("meta"):
        tower = tower_class(config)(config).requires_grad_(False)
        _fill(tower, SafetensorsHeaders(config.folder), config)
    return tower


def _fill(tower: Tower, source: SafetensorsFolder, config: CheckpointConfig) -> None:
    stored = {ours: name for name, ours in split_names(source.names(), config)["vision"].items()}
    owner = f"the vision tower {type(tower).__name__}"
    fill(owner, tower.targets(set(stored)), _dequantized(source, stored), stored)


def stored_in_fp8(config: CheckpointConfig) -> Set[str]:
    """The tower's linear layers that the checkpoint has in FP8, and so means to run in it: all, or all but the
    projector's; none where it is fewer, which run dequantized."""
    names = split_names(SafetensorsFolder(config.folder).names(), config)["vision"].values()
    scaled = {name.removesuffix(".weight_scale") for name in names if name.endswith(".weight_scale")}
    for parts, whole in _STORED_APART.items():
        scaled = {re.sub(parts, whole, module) for module in scaled}
    every = unfilled_tower(config).fp8_linears().keys() if scaled else set()
    layers = {name for name in every if not name.startswith("projector.")}
    return next((some for some in (set(every), layers) if some <= scaled), set())


def unfilled_tower(config: CheckpointConfig) -> Tower:
    """The tower's shapes in float32 without its weights, to count bytes with."""
    with torch.device("meta"):
        return tower_class(config)(config)


def vision_fingerprint(config: CheckpointConfig) -> str:
    """A hex digest of the vision weights as stored and of the settings that shape their use."""
    source = SafetensorsFolder(config.folder)
    digest = blake2b(repr(config.vision).encode(), digest_size=16)
    for name in sorted(split_names(source.names(), config)["vision"]):
        digest.update(name.encode())
        digest.update(source.get(name).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _dequantized(source: SafetensorsFolder, stored: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Our names and tensors, by the names they are ``stored`` under; weights in e4m3 times their scales, in float32."""
    for name, place in stored.items():
        weight, scale = (stored.get(f"{name.rpartition('.')[0]}.{leaf}") for leaf in ("weight", "weight_scale"))
        quantized = weight is not None and scale is not None and source.dtype(weight) == "F8_E4M3"
        if not quantized or place not in (weight, scale):
            yield name, source.get(place)
        elif place == weight:
            assert scale is not None
            values, scales = source.get(weight).float(), source.get(scale).float().flatten()
            if len(scales) not in (1, len(values)):
                raise CheckpointError(f"{scale} has {len(scales)} values for the {len(values)} rows of {weight}")
            yield name, values * scales[:, None]


def _draw(tower: Tower) -> None:
    """Random matrices from a fixed seed, no biases; norms keep their initial values."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in tower.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02, generator=generator)
        elif name.endswith("bias"):
            parameter.zero_()
