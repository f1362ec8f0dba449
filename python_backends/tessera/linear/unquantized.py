"""Plain weights in the model's dtype: linear layers', the normalisation's and the token embeddings'."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from tessera.kernels.fp8_rows import Fp8Rows
from tessera.kernels.operands import (
    EARLY_ROWS,
    GATE_UP_MULTIPLE,
    K_MULTIPLE,
    MAX_ROWS,
    DeferredProduct,
    EarlyProduct,
    NormedRows,
    Operand,
    finished,
    plan_early,
    rows_of,
)
from tessera.kernels.tuning import layer_kernels
from tessera.linear.scheme import Linear, LinearScheme, LinearShape, Tensors, Ways, plain_of

CUBLAS, FEW_ROWS, FUSED, EARLY = "cublas", "few rows", "fused", "early"
_FUSED_FROM = 4096  # rows, where it is not measured: below they are mostly of a graph, which may take the library's
_LARGE = ((9, 0), (10, 0), (10, 3))  # compute capabilities with more than 180 KB of shared memory


class Unquantized(LinearScheme):
    """``weight`` [out, in].

    A product for few rows is measured up to its limit, and for gate_up, from 1024 rows on, one that ends in the gated
    activation.
    """

    # The product for few rows pads to the first three; the next keeps what is found for 1024 from fewer than 513.
    measured_rows = (16, 32, 64, 512, 1024, 2048, 4096, 8192)
    margin = 0.01

    def leaves(self) -> set[str]:
        return {"weight"}

    def decode(self, tensors: Tensors, out_features: int, in_features: int) -> dict[str, torch.Tensor]:
        return {"weight": plain_of(tensors, "weight")}

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        shape = (layer.out_features, layer.in_features)
        layer.register_buffer("weight", torch.zeros(shape, dtype=dtype, device=device))

    def randomize(self, layer: Linear, generator: torch.Generator) -> None:
        layer.weight.normal_(0, 0.02, generator=generator)

    def in_words(self, layer: Linear) -> str:
        return str(layer.dtype).removeprefix("torch.")

    def normalises(self, layer: Linear, rows: int) -> bool:
        return self.way(layer, rows) == EARLY

    def apply(self, layer: Linear, x: Operand) -> torch.Tensor:
        return finished(self.apply_deferred(layer, x))

    def apply_deferred(self, layer: Linear, x: Operand) -> torch.Tensor | DeferredProduct:
        assert not isinstance(x, Fp8Rows)
        weight, bias = layer.get_buffer("weight"), layer.bias
        way = self.way(layer, rows_of(x))
        if way == EARLY:
            return EarlyProduct(x, weight, bias)
        assert isinstance(x, torch.Tensor)
        if way == FEW_ROWS:
            return layer_kernels(x.device.type).skinny_deferred(x, weight, bias)
        return F.linear(x, weight, bias)

    def apply_gated(self, layer: Linear, x: Operand, fp8: bool = False) -> torch.Tensor | Fp8Rows:
        way = self.way(layer, rows_of(x)) if rows_of(x) and not fp8 else CUBLAS
        if way == CUBLAS:
            return super().apply_gated(layer, x, fp8)
        kernels = layer_kernels(layer.device.type)
        product = {FEW_ROWS: kernels.skinny_gate_up, FUSED: kernels.gate_up_silu, EARLY: kernels.early_gate_up}[way]
        return product(x, layer.get_buffer("weight"))

    def possible(self, layer: Linear, shape: LinearShape, rows: int) -> list[str]:
        gated = shape.place == "gate_up"
        if shape.dtype.itemsize != 2 or (gated and shape.bias):  # no kernel adds one before the activation
            return []
        if rows > max(shape.most_rows, MAX_ROWS):  # there is no memory for more
            return []
        whole = shape.inputs % GATE_UP_MULTIPLE == 0 and shape.outputs % (2 * GATE_UP_MULTIPLE) == 0
        few = rows <= MAX_ROWS and shape.inputs % K_MULTIPLE == 0
        fused = gated and whole and rows >= 1024 and _fits(layer.device)
        # A stream of float16 could overflow where the norm's weights come first.
        fits = shape.dtype == torch.bfloat16 and plan_early(shape.outputs, shape.inputs, gated) is not None
        early = rows <= EARLY_ROWS and fits
        return [CUBLAS, *[FEW_ROWS] * few, *[EARLY] * early, *[FUSED] * fused]

    def fixed_ways(self, layer: Linear, shape: LinearShape) -> Ways:
        """Of gate and up, whose product for few rows does not split k."""
        if shape.place != "gate_up":
            return ()
        few = FEW_ROWS in self.possible(layer, shape, 1)
        fused = FUSED in self.possible(layer, shape, _FUSED_FROM)
        return *[(MAX_ROWS, FEW_ROWS)] * few, (_FUSED_FROM - 1, CUBLAS), *[(sys.maxsize, FUSED)] * fused

    def beyond(self, layer: Linear) -> str:
        """What was found for the most rows that a step may have measured."""
        return FUSED if self.ways and self.ways[-1][1] == FUSED else CUBLAS


def _fits(device: torch.device) -> bool:
    """Whether a GPU has the shared memory that the fused product takes."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in _LARGE


class RmsNorm(nn.Module):
    """Adds to the residual stream and normalises it: the two belong together, so that one kernel can do both."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(size, dtype=dtype, device=device))
        self._eps = eps
        self._add_and_normalise = layer_kernels(device.type).add_rms_norm

    def forward(
        self,
        x: torch.Tensor | DeferredProduct,
        residual: torch.Tensor | None,
        fp8: bool = False,
        later: bool = False,
    ) -> tuple[Operand, torch.Tensor]:
        """x [n, size] and residual [n, size] or None -> (normalised sum, sum); residual may be overwritten.

        ``fp8``: the normalised sum is quantized, a row at a time. ``later``: where the sum costs no kernel, its
        reader normalises it.
        """
        if isinstance(x, EarlyProduct) and residual is not None:
            x, residual = x.added_to(residual), None
        if later and residual is None and isinstance(x, torch.Tensor):
            return NormedRows(x, self.get_buffer("weight"), self._eps), x
        return self._add_and_normalise(x, residual, self.get_buffer("weight"), self._eps, fp8)


class Embedding(nn.Module):
    """``weight`` [vocabulary, hidden]; a token's row has ``row_size`` values, of which its embedding are the first."""

    def __init__(self, vocab_size: int, size: int, row_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty((vocab_size, size), dtype=dtype, device=device))
        self._behind = row_size - size

    def forward(
        self, ids: torch.Tensor, image_index: torch.Tensor | None = None, image_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """ids int64 [n] -> [n, row_size]; ``image_rows`` [r, row_size] replace the rows ``image_index`` [r]."""
        rows = self.tokens(ids)
        if self._behind:
            rows = F.pad(rows, (0, self._behind))
        return rows if image_index is None or image_rows is None else rows.index_copy_(0, image_index, image_rows)

    def tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings alone: ids int64 [n] -> [n, hidden]."""
        return F.embedding(ids, self.get_buffer("weight"))
