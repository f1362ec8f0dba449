"""What kernels take: how many rows, a paged cache, products that the next kernel finishes, which saves a launch; and
how flash attention's are cut into programs, vision's and the engine's. Needs no triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from tessera.kernels.fp8_rows import Fp8Rows, Fp8Sums
from tessera.kernels.tuning import layer_kernels
from tessera.kernels.w4_layout import PackedW4

#: the most rows of a product for few rows, in 16 bits or of 4-bit weights, and what divides k of the former
MAX_ROWS, K_MULTIPLE = 64, 64
#: of such a product in e4m3
FP8_MAX_ROWS, FP8_K_MULTIPLE = 256, 128
#: the most rows of a product that asks for its weights early, and its programs' warps
EARLY_ROWS, EARLY_WARPS = 16, 4
#: of the fused gate-up product's k and size: TMA wants rows of whole 16 bytes
GATE_UP_MULTIPLE = 8
_EARLY_K_MULTIPLE = 128
_HELD = 48 * 1024  # values of the weights in a program's registers
_LEAST = 16  # values of a matrix unit's products


class PagedCache(NamedTuple):
    """One layer's keys and values [num_blocks, block_size, kv_heads, head_dim].

    In e4m3 they are multiplied by their scales, float32 [num_blocks, block_size, kv_heads].
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class HeadNorms(NamedTuple):
    """The root-mean-square norms of single heads: their weights [head_dim], shared by all queries and all keys."""

    queries: torch.Tensor
    keys: torch.Tensor
    eps: float


class Partials(NamedTuple):
    """A product whose k was shared out among programs: it is the sum of ``parts``, in their order, plus ``bias``."""

    parts: torch.Tensor  # [splits, m, n] float32, or of the product's dtype where m is large
    bias: torch.Tensor | None  # [n]
    dtype: torch.dtype  # of the product

    @property
    def rows(self) -> int:
        return self.parts.shape[1]

    def product(self) -> torch.Tensor:
        """[m, n]."""
        if self.parts.is_cuda:
            from tessera.kernels.fp8 import add_partials

            return add_partials(*self)
        total = self.parts.float().sum(0)
        return (total if self.bias is None else total + self.bias).to(self.dtype)


class NormedRows(NamedTuple):
    """Rows that their reader normalises: their root mean square becomes 1, then they are multiplied by weights."""

    stream: torch.Tensor  # [m, k]
    weight: torch.Tensor  # [k]
    eps: float


#: what a linear layer multiplies
Operand = torch.Tensor | Fp8Rows | NormedRows


def rows_of(x: Operand) -> int:
    """How many there are."""
    return len(x if isinstance(x, torch.Tensor) else x[0])


class EarlyProduct(NamedTuple):
    """A product of few rows that is not begun: its reader makes it, together with what comes behind."""

    x: Operand  # [m, k]; not in e4m3
    weight: torch.Tensor  # [n, k]
    bias: torch.Tensor | None  # [n]

    @property
    def rows(self) -> int:
        return rows_of(self.x)

    def product(self) -> torch.Tensor:
        """[m, n]."""
        return layer_kernels(self.weight.device.type).early_linear(*self)

    def added_to(self, residual: torch.Tensor) -> torch.Tensor:
        """[m, n], in place."""
        return layer_kernels(self.weight.device.type).early_linear(*self, residual)


DeferredProduct = Fp8Sums | Partials | EarlyProduct
#: a weight [n, k] as the products of experts take it, theirs one below the other
StoredWeights = torch.Tensor | Fp8Rows | PackedW4
#: x, of tokens or of pairs, and the weights that it meets
GroupedOperands = tuple[torch.Tensor | Fp8Rows, StoredWeights]


class Routing(NamedTuple):
    """Which tokens each expert sees: a pair is token * picked + place, the place of an expert among a token's."""

    pairs: torch.Tensor  # int32 [tokens * picked], expert after expert, each one's in order
    bounds: torch.Tensor  # int32 [experts + 1]: where each expert's begin, and the end
    weights: torch.Tensor  # [tokens, picked], of the model's dtype


class Allowed(NamedTuple):
    """Which tokens each of a step's rows may choose."""

    lines: torch.Tensor  # int64 [m]: its line of ``bits``, or -1 for any token
    bits: torch.Tensor  # uint8 [lines, ceil(vocabulary / 8)], the lowest bit first; one line or more


class PenaltyLines(NamedTuple):
    """What sequences have said, a line each, and what they ask for.

    The ``rows`` of a step's logits that ask for penalties are int64 [6, r]: where each stands among the step's rows,
    its line, how many tokens of that it knows, how many of these are a draft's, which the line's echoes do not know,
    1, or 0 where it only fills up a graph's rows: its line is then nobody's, of which it knows no token; and the
    draft's token behind it, which is that of the next row, or -2 where there is none.
    """

    tokens: torch.Tensor  # int32 [lines, width]; negative ones are pictures
    echoes: torch.Tensor  # int32 [lines, width]; at d: how many of the last tokens equal those d before, one by one
    facts: torch.Tensor  # int64 [2, lines]: how many tokens are the prompt's; the size of n-grams not to repeat, or 0
    amounts: torch.Tensor  # float32 [3, lines]: of repetition, frequency and presence


def finished(product: torch.Tensor | DeferredProduct) -> torch.Tensor:
    return product if isinstance(product, torch.Tensor) else product.product()


@dataclass(frozen=True)
class AttentionPlan:
    """``rows`` (queries, times the heads that share a key head) and ``tokens`` (keys) of a tile, powers of two of at
    least 16; ``warps``, a power of two; ``stages`` of the pipeline of loads.
    """

    rows: int
    tokens: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return "/".join(str(number) for number in vars(self).values())

    @property
    def launch(self) -> dict[str, int]:
        """What triton's launch takes of it."""
        return {"ROWS": self.rows, "TOKENS": self.tokens, "num_warps": self.warps, "num_stages": self.stages}


class EarlyPlan(NamedTuple):
    """A program takes ``columns`` of the result and ``block_k`` of k at a time; powers of two."""

    columns: int
    block_k: int


@cache
def plan_early(n: int, k: int, gated: bool = False) -> EarlyPlan | None:
    """How to multiply up to 16 rows by weights [n, k]; None where they do not fit. A pure function."""
    most = min(32, 1 << (_HELD // k).bit_length() - 1) if k <= _HELD else 0
    columns = min(most, n & -n)
    if k % _EARLY_K_MULTIPLE or columns < (16 if gated else 8):
        return None
    return EarlyPlan(columns, min(k & -k, 1024))


@dataclass(frozen=True)
class HopperPlan:
    """``rows`` (queries) of a tile, of which each of two groups of ``warps`` takes half, a power of two and 16 for each
    warp at least; ``tokens`` (keys) of a tile, a power of two; ``stages`` of keys and values in the shared memory.
    ``programs`` share the tiles of queries and the heads evenly: one for each multiprocessor.

    The numbers are those that were the fastest on an H200 (docs/gpu.md).
    """

    programs: int
    rows: int = 128
    tokens: int = 128
    warps: int = 4
    stages: int = 4

    def __str__(self) -> str:
        return f"{self.rows}/{self.tokens}/{self.warps}/{self.stages}"


def parts_of(size: int) -> tuple[int, int]:
    """A head size as the sum of two powers of two, the second perhaps 0. ValueError if it is none."""
    wide = 1 << (size.bit_length() - 1)
    tail = size - wide
    if wide < _LEAST or (tail and (tail < _LEAST or tail & (tail - 1))):
        raise ValueError(f"varlen_attention: heads of {size} values are no two powers of two of at least {_LEAST}")
    return wide, tail


def filled_head(size: int) -> int:
    """The least size of a head that holds ``size`` values and that attention within pictures takes: 80 for 72."""
    powers = [_LEAST << exponent for exponent in range(size.bit_length())]
    return min(wide + tail for wide in powers for tail in (0, *powers) if tail < wide and wide + tail >= size)


def query_tiles(lengths: Sequence[int], rows: int) -> np.ndarray:
    """Cuts pictures that lie one after the other into tiles of ``rows`` queries: int32 [tiles, 3] of (the tile's first
    patch, its picture's first, its picture's end). The longest pictures come first, so that none starts at the end."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    number = -(-np.asarray(lengths) // rows)
    order = np.argsort(-number, kind="stable")
    picture = np.repeat(order, number[order])
    within = np.arange(len(picture)) - np.repeat(np.cumsum(number[order]) - number[order], number[order])
    return np.stack((begins[picture] + rows * within, begins[picture], ends[picture]), axis=1).astype(np.int32)
