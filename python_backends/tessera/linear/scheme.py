"""Linear layers and the schemes that decide how they store, load and apply their weights.

A stored format is a reader: it names the tensors of a module and decodes them. An execution form (:mod:`unquantized`,
:mod:`int4`, :mod:`fp8`) is the scheme class that readers inherit from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from tessera.checkpoint.weights import Target, TensorError, listed, plain
from tessera.errors import CheckpointError
from tessera.kernels.fp8_rows import MULTIPLE, Fp8Rows, Fp8Sums, fp8_linear, fp8_sums, quantize_rows
from tessera.kernels.operands import (
    FP8_K_MULTIPLE,
    FP8_MAX_ROWS,
    DeferredProduct,
    GroupedOperands,
    NormedRows,
    Operand,
    Routing,
    rows_of,
)
from tessera.kernels.tuning import layer_kernels

#: ways to multiply rows in e4m3 by weights in e4m3
PRODUCTS = ("rescaled", "rows", "skinny")
_UNITS_FROM = (8, 9)  # the compute capability

#: a stored module's, by their names after the module's
Tensors = Mapping[str, torch.Tensor]
#: ascending numbers of rows, and the way's name up to each
Ways = tuple[tuple[int, str], ...]
#: where a linear layer stands: in a decoder layer, which decides what runs before and behind it, or alone; or whose it
#: is: the experts' products are grouped, and have no ways to choose from
Place = Literal["qkv", "output", "gate_up", "down", "alone", "experts"]


@dataclass(frozen=True)
class LinearShape:
    """What the speed of a linear layer depends on; ``most_rows``: of a step, if known, for which there is memory."""

    outputs: int
    inputs: int
    bias: bool
    place: Place
    dtype: torch.dtype
    most_rows: int = 0

    def __str__(self) -> str:
        return f"linear {self.place}{' + bias' * self.bias} {self.outputs} x {self.inputs}"


class LinearScheme(ABC):
    """Owns the tensors of one :class:`Linear`, which may be several stored modules (such as q, k and v) in one.

    The layer's buffers have its output features as dimension 0, so that whatever the format, rows say which module's
    they are. Those in ``shared`` belong to the input instead: they begin as None, and all modules must agree on them.
    ``optional``: tensors that a stored module may have. The bias is the layer's own affair.

    There may be several ways to compute a product: ``ways`` says which is the fastest up to how many rows, and
    ``beyond`` which one for more and for none. For those in PRODUCTS a layer has ``weight`` e4m3 [out, in], ``scales``
    float32 [out] and ``bias``.
    """

    shared: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    ways: Ways = ()
    #: the numbers of rows that the fastest way is measured for
    measured_rows: Sequence[int] = (16, 32, 64, 96, 128, 256, 512, 1024)
    #: ways within this share of the fastest are as fast, since clocks and neighbours are others in a model: then cuBLAS
    margin = 0.03

    @abstractmethod
    def leaves(self) -> set[str]:
        """What each stored module holds beside a bias."""

    @abstractmethod
    def decode(self, tensors: Tensors, out_features: int, in_features: int) -> dict[str, torch.Tensor]:
        """The stored tensors of one module -> what goes into the buffers. CheckpointError names what is wrong."""

    @abstractmethod
    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        """Registers the layer's empty buffers."""

    @abstractmethod
    def randomize(self, layer: Linear, generator: torch.Generator) -> None:
        """Fills the buffers so that W is normally distributed by 0.02 about 0."""

    def finish(self, layer: Linear) -> None:  # noqa: B027 - some schemes need nothing here
        """Called once when the buffers are filled, for instance to repack."""

    @abstractmethod
    def in_words(self, layer: Linear) -> str:
        """What the layer's weights are, for people: "bfloat16", "fp8"."""

    @abstractmethod
    def possible(self, layer: Linear, shape: LinearShape, rows: int) -> list[str]:
        """The ways to multiply this many rows, of equally fast ones the best first; none where none is looked for."""

    def fixed_ways(self, layer: Linear, shape: LinearShape) -> Ways:
        """The ways where no row's bits may depend on other rows."""
        return ()

    @abstractmethod
    def beyond(self, layer: Linear) -> str:
        """The way for any number of rows."""

    def check(self, layer: Linear, shape: LinearShape) -> None:  # noqa: B027 - most kernels need no check
        """Called once before the ways of layers such as this one are measured."""

    def way(self, layer: Linear, rows: int) -> str:
        """The fastest for this many rows."""
        for most, name in self.ways if rows else ():
            if rows <= most and (name != "skinny" or layer.in_features % FP8_K_MULTIPLE == 0):
                return name
        return self.beyond(layer)

    def wants_fp8_input(self, layer: Linear, rows: int) -> bool:
        """Whether for this many rows ``apply`` wants its input already quantized."""
        return self.way(layer, rows) in PRODUCTS

    def normalises(self, layer: Linear, rows: int) -> bool:
        """Whether for this many rows it had rather have its input before the norm."""
        return False

    def quantized(self, layer: Linear, x: Operand) -> Fp8Rows:
        assert not isinstance(x, NormedRows)
        return x if isinstance(x, Fp8Rows) else quantize_rows(x.contiguous())

    @abstractmethod
    def apply(self, layer: Linear, x: Operand) -> torch.Tensor:
        """x [n, in_features] -> [n, out_features]. Only a scheme that ``wants_fp8_input`` is given Fp8Rows."""

    def apply_deferred(self, layer: Linear, x: Operand) -> torch.Tensor | DeferredProduct:
        """As ``apply``; the end of the product may be left to what comes next."""
        return self._sums(layer, x) if self._can_wait(layer, x) else self.apply(layer, x)

    def apply_gated(self, layer: Linear, x: Operand, fp8: bool = False) -> torch.Tensor | Fp8Rows:
        """x [n, in_features] -> silu(first half of the outputs) * second half [n, out_features / 2], in FP8 if so."""
        kernels = layer_kernels(layer.device.type)
        if isinstance(x, Fp8Rows) and layer.bias is None and self._can_wait(layer, x):
            sums = self._sums(layer, x)
            return kernels.silu_and_multiply(sums.sums, fp8, (sums.x_scales, sums.scales))
        return kernels.silu_and_multiply(self.apply(layer, x), fp8)

    def grouped(self, layer: Linear, x: torch.Tensor, routing: Routing | None = None) -> GroupedOperands:
        """x [n, in_features] and the weights as the grouped products of experts take them; ``routing``: that whose
        pairs x's rows are, None where they are tokens."""
        return x, layer.get_buffer("weight")

    def multiply(self, layer: Linear, x: Operand, way: str) -> torch.Tensor:
        """By one of PRODUCTS."""
        if way == "rescaled":
            return self._sums(layer, x).product()
        product = fp8_linear if way == "rows" else layer_kernels(layer.device.type).skinny_fp8
        return product(self.quantized(layer, x), layer.weight, layer.scales, layer.bias, layer.dtype)

    def _sums(self, layer: Linear, x: Operand) -> Fp8Sums:
        rows = self.quantized(layer, x)
        return Fp8Sums(fp8_sums(rows, layer.weight, layer.dtype), rows.scales, layer.scales, layer.bias)

    def _can_wait(self, layer: Linear, x: Operand) -> bool:
        """Whether the product's scales are applied after it, by what comes next."""
        return self.way(layer, rows_of(x)) == "rescaled"


def products_for(layer: Linear, rows: int) -> list[str]:
    """Those of PRODUCTS that take this many rows."""
    skinny = rows <= FP8_MAX_ROWS and layer.in_features % FP8_K_MULTIPLE == 0
    return [name for name in PRODUCTS if name != "skinny" or skinny]


def has_units(layer: Linear) -> bool:
    """Whether the device multiplies e4m3 rows by weights of this shape."""
    if layer.device.type != "cuda" or layer.dtype != torch.bfloat16:
        return False
    from tessera.kernels.fp8 import MAX_SIZE

    whole = layer.out_features % MULTIPLE == 0 and layer.in_features % MULTIPLE == 0
    return whole and layer.in_features <= MAX_SIZE and torch.cuda.get_device_capability(layer.device) >= _UNITS_FROM


#: the rows of a layer that a stored module fills, in the order in which it stores them
Rows = slice | torch.Tensor
#: the stored modules of one layer -> their scheme
SchemeSelector = Callable[[Collection[str]], LinearScheme]


def stacked(names: Sequence[str], sizes: Sequence[int]) -> dict[str, Rows]:
    """Modules whose rows follow each other, of this many output features each; one name holds all of them."""
    if len(names) == 1:
        sizes = [sum(sizes)]
    return {name: slice(end - size, end) for name, size, end in zip(names, sizes, accumulate(sizes), strict=True)}


class Linear(nn.Module):
    """y = x W^T + b over one or several stored modules.

    ``modules``: each one's name and the rows it fills. ``out_features`` may be more than they fill; the rest is zero.
    The buffers exist from the first module that is read on, and the scheme finishes with the last: so a model is
    never held in two forms.
    """

    #: how many experts share its rows, 0 where all rows are one layer's, and how many of them a token sees
    experts: int = 0
    picked: int = 0

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The buffers, which each scheme names."""

    def __init__(
        self,
        in_features: int,
        modules: Mapping[str, Rows],
        bias: bool,
        schemes: SchemeSelector,
        dtype: torch.dtype,
        device: torch.device,
        out_features: int | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.sizes = {name: _count(rows) for name, rows in modules.items()}
        self.out_features = out_features or sum(self.sizes.values())
        self.has_bias = bias
        self.dtype = dtype
        self.device = device
        self.scheme = schemes(modules)
        self._rows = modules
        self._read: dict[str, dict[str, torch.Tensor]] = {}
        self._unread = set(modules)

    def forward(self, x: Operand) -> torch.Tensor:
        return self.scheme.apply(self, x)

    def deferred(self, x: Operand) -> torch.Tensor | DeferredProduct:
        """The outputs for who can finish them."""
        return self.scheme.apply_deferred(self, x)

    def gated(self, x: Operand, fp8: bool = False) -> torch.Tensor | Fp8Rows:
        """Of a layer whose halves are gate and up: silu(gate) * up [n, out_features / 2]."""
        return self.scheme.apply_gated(self, x, fp8)

    def wants_fp8_input(self, rows: int) -> bool:
        """Whether it wants its input of this many rows already quantized."""
        return self.scheme.wants_fp8_input(self, rows)

    def normalises(self, rows: int) -> bool:
        """Whether it had rather have its input of this many rows before the norm."""
        return self.scheme.normalises(self, rows)

    @property
    def products_a_token(self) -> int:
        """Multiplications by weights that it takes for one token."""
        return self.in_features * self.out_features

    @property
    def held(self) -> tuple[str, ...]:
        """The names of the buffers that its scheme keeps."""
        return tuple(sorted(name for name, _ in self.named_buffers()))

    def targets(self, stored: Collection[str]) -> dict[str, Target]:
        """What fills it, by name; ``stored``: the names that the checkpoint has."""
        required = self.scheme.leaves() | {"bias"} if self.has_bias else self.scheme.leaves()
        targets: dict[str, Target] = {}
        for module in self._rows:
            leaves = required | {leaf for leaf in self.scheme.optional if f"{module}.{leaf}" in stored}
            targets |= {f"{module}.{leaf}": partial(self._take, module, leaf, len(leaves)) for leaf in leaves}
        return targets

    def randomize(self, generator: torch.Generator) -> None:
        """Fills it as if from a checkpoint of small random numbers."""
        self._create()
        self.scheme.randomize(self, generator)
        if self.has_bias:
            self.bias.normal_(0, 0.02, generator=generator)
        self.scheme.finish(self)

    def _create(self) -> None:
        self.scheme.create(self, self.dtype, self.device)
        bias = torch.zeros(self.out_features, dtype=self.dtype, device=self.device) if self.has_bias else None
        self.register_buffer("bias", bias)

    def _take(self, module: str, leaf: str, count: int, tensor: torch.Tensor) -> None:
        """Keeps one tensor of a module; with the last of ``count`` decodes them, where the layer is."""
        read = self._read.setdefault(module, {})
        read[leaf] = tensor.to(self.device)
        if len(read) < count:
            return
        try:
            self._settle(module, self._read.pop(module))
        except TensorError as error:
            raise TensorError(f"{module}.{error.name}", str(error)) from None
        except CheckpointError as error:
            raise TensorError(module, str(error)) from None

    def _settle(self, module: str, tensors: Tensors) -> None:
        """Decodes a whole module's tensors into the buffers. TensorError names the one at fault as the module does."""
        decoded = self.scheme.decode(tensors, self.sizes[module], self.in_features)
        if "bias" in tensors:
            bias = plain_of(tensors, "bias")
            if self.has_bias:
                decoded["bias"] = bias
            elif has_values(bias) and bool(bias.any()):
                raise TensorError("bias", "is not zero, and the model has none there")
        if len(self._unread) == len(self._rows):
            self._create()
        self._place(module, decoded)
        self._unread.remove(module)
        if not self._unread and self.device.type != "meta":
            self.scheme.finish(self)

    def _place(self, module: str, decoded: Tensors) -> None:
        for name, tensor in decoded.items():
            target = getattr(self, name)
            if name in self.scheme.shared:
                if target is not None and has_values(target) and not torch.equal(target, tensor):
                    others = listed(other for other in self._rows if other != module)
                    raise CheckpointError(f"{name} differ from those of {others}, which have the same input")
                setattr(self, name, tensor)
                continue
            expected = [self.sizes[module], *target.shape[1:]]
            if list(tensor.shape) != expected:
                raise TensorError(name, f"has shape {list(tensor.shape)}, expected {expected}")
            as_bits = torch.uint8 if target.itemsize == 1 else target.dtype  # not every device indexes float8
            target.view(as_bits)[self._rows[module]] = tensor.to(target.dtype).view(as_bits)


def shaped(tensors: Tensors, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A module's tensor, which must have this shape, and this dtype or a plain floating one."""
    tensor = tensors[name]
    if tensor.shape != shape:
        raise TensorError(name, f"has shape {list(tensor.shape)}, expected {list(shape)}")
    if dtype is None:
        return plain_of(tensors, name)
    if tensor.dtype != dtype:
        raise TensorError(name, f"is stored as {tensor.dtype}, expected {dtype}")
    return tensor


def plain_of(tensors: Tensors, name: str) -> torch.Tensor:
    """A module's tensor, which must be a plain floating one."""
    try:
        return plain(tensors[name])
    except CheckpointError as error:
        raise TensorError(name, str(error)) from None


def has_values(tensor: torch.Tensor) -> bool:
    """False for one that is known by a file's header alone: only its shape and dtype can be judged."""
    return tensor.device.type != "meta"


def _count(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)
