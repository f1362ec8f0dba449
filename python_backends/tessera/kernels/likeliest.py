"""The likeliest token of each row of logits, of those that it may choose, and whether the row is finite, in one pass.

torch takes three passes (argmax, aminmax, a gather) and a launch for each comparison behind them, which for a small
model's decode step is as long as two of its layers; and under masks some twenty launches more, over copies of the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.kernels.fp8 import early_launch, wait_for_previous
from tessera.kernels.operands import Allowed

_BLOCK = 4096


def likeliest(logits: torch.Tensor, allowed: Allowed | None = None) -> torch.Tensor:
    """logits of any float dtype [m, vocabulary], rows contiguous -> int64 [m], of those ``allowed``, of several equal
    ones the first; -1 for a row with any NaN or infinity. ValueError for rows that are not contiguous."""
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"rows of logits are not contiguous: strides {logits.stride()}")
    parts = triton.cdiv(vocabulary, _BLOCK)
    tops = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    early = early_launch(logits.device)
    lines, bits = (None, None) if allowed is None else allowed
    width = 0 if bits is None else bits.shape[1]
    if rows:
        _of_parts[(parts, rows)](
            *(logits, lines, bits, tops, places, logits.stride(0), width, vocabulary), BLOCK=_BLOCK, **early
        )
        _of_rows[(rows,)](tops, places, chosen, parts, BLOCK=triton.next_power_of_2(parts), **early)
    return chosen


@triton.jit
def _of_parts(
    logits, lines, bits, tops, places, row_stride, width, vocabulary, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """A part's largest logit that is allowed and its place; infinity and -1 where a logit is not finite."""
    wait_for_previous(EARLY)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    logit = tl.load(logits + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    finite = tl.min((tl.abs(logit) < float("inf")).to(tl.int32), 0) > 0
    logit = tl.where(inside, logit, -float("inf"))
    if bits is not None:
        line = tl.load(lines + row)
        eight = tl.load(bits + line * width + column // 8, mask=inside & (line >= 0), other=255)
        logit = tl.where((eight >> (column % 8).to(tl.uint8)) & 1 != 0, logit, -float("inf"))
    top = tl.max(logit, 0)
    first = tl.min(tl.where(logit == top, column, BLOCK * tl.num_programs(0)), 0)
    part = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(tops + part, tl.where(finite, top, float("inf")))
    tl.store(places + part, tl.where(finite, first, -1).to(tl.int64))


@triton.jit
def _of_rows(tops, places, chosen, parts, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The first of a row's parts that has the largest logit; one that is not finite has the largest."""
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    inside = part < parts
    top = tl.load(tops + row * parts + part, mask=inside, other=-float("inf"))
    place = tl.load(places + row * parts + part, mask=inside, other=0)
    largest = tl.max(top, 0)
    last = 9223372036854775807  # of int64
    tl.store(chosen + row, tl.min(tl.where(inside & (top == largest), place, last), 0))
