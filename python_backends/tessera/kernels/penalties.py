"""Penalties on what a sequence has said, and n-grams that it may not say twice: a launch or two in place of thirty.

With few sequences a penalized step takes as long as the host needs to launch it, not as the GPU needs to run it: a
launch takes tens of microseconds on some hosts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.kernels.fp8 import early_launch, wait_for_previous
from tessera.kernels.operands import PenaltyRows

_BLOCK, _COUNTED = 64, 128  # places of a program, and answered ones that they are compared with at a time


def penalized(
    logits: torch.Tensor, tokens: torch.Tensor, rows: PenaltyRows, echoes: torch.Tensor | None
) -> torch.Tensor:
    """logits of any float dtype [m, vocabulary], rows contiguous -> float32 [m, vocabulary], changed in ``rows`` alone.

    ``tokens`` int32 [lines, width]: what sequences have said; negative ones are pictures. Each that a row's line holds
    is penalized once: by the repetition penalty, times or over, then the answer's own by frequency and presence. What
    would end an n-gram that is there already, by ``echoes`` int32 [r, width] (see :func:`append_tokens`), is float32's
    lowest; None: nobody asks for that. ValueError for rows that are not contiguous.
    """
    if logits.stride(1) != 1:
        raise ValueError(f"rows of logits are not contiguous: strides {logits.stride()}")
    scores = logits.to(torch.float32, copy=True)
    grid = (triton.cdiv(rows.width, _BLOCK), rows.numbers.shape[1])
    sizes = logits.shape[1], tokens.shape[1], rows.numbers.shape[1]
    early = early_launch(logits.device)
    if rows.width:
        given = logits, scores, tokens, rows.numbers, rows.amounts, logits.stride(0), *sizes
        _penalize[grid](*given, BLOCK=_BLOCK, COUNTED=_COUNTED, **early)
    if rows.width and echoes is not None:
        _forbid[grid](scores, tokens, echoes, rows.numbers, *sizes, echoes.stride(0), BLOCK=_BLOCK, **early)
    return scores


def append_tokens(
    tokens: torch.Tensor, echoes: torch.Tensor, rows: PenaltyRows, before: torch.Tensor | None, chosen: torch.Tensor
) -> None:
    """Puts the tokens ``chosen`` int64 [m], by the rows' places, behind their lines of ``tokens`` int32 [lines, width].

    ``echoes`` int32, like tokens: at a place of a line how many tokens before it equal the line's last ones. They are
    lengthened where ``before`` int32 [r, width], a copy of the rows' own, is given.
    """
    grid = (triton.cdiv(rows.width + 1, _BLOCK), rows.numbers.shape[1])
    given = tokens, echoes, before, rows.numbers, chosen, tokens.shape[1], rows.numbers.shape[1]
    stride = 0 if before is None else before.stride(0)
    _append[grid](*given, stride, BLOCK=_BLOCK, **early_launch(tokens.device))


@triton.jit
def _penalize(
    logits, scores, tokens, numbers, amounts, logits_row, vocabulary, width, count,
    BLOCK: tl.constexpr, COUNTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row = tl.program_id(1)
    place = tl.load(numbers + row)
    line = tokens + tl.load(numbers + count + row) * width
    length = tl.load(numbers + 2 * count + row).to(tl.int32)
    prompt = tl.load(numbers + 3 * count + row).to(tl.int32)
    repetition = tl.load(amounts + row)
    frequency = tl.load(amounts + count + row)
    presence = tl.load(amounts + 2 * count + row)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(line + at, mask=at < length, other=-1)
    known = token >= 0
    value = tl.load(logits + place * logits_row + token, mask=known, other=0.0).to(tl.float32)
    value = tl.where(value < 0, value * repetition, value / repetition)
    if (frequency != 0) | (presence != 0):
        times = tl.zeros([BLOCK], tl.int32)
        for first in range(prompt, length, COUNTED):
            answered = first + tl.arange(0, COUNTED)
            said = tl.load(line + answered, mask=answered < length, other=-1)
            times += tl.sum((token[:, None] == said[None, :]).to(tl.int32), 1)
        value -= frequency * times
        value -= tl.where(times > 0, presence, 0.0)
    # Of a token that stands at several places all write the same.
    tl.store(scores + place * vocabulary + token, value, mask=known)


@triton.jit
def _forbid(
    scores, tokens, echoes, numbers, vocabulary, width, count, echo_row, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    wait_for_previous(EARLY)
    row = tl.program_id(1)
    place = tl.load(numbers + row) * vocabulary
    line = tokens + tl.load(numbers + count + row) * width
    length = tl.load(numbers + 2 * count + row)
    size = tl.load(numbers + 4 * count + row)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(line + at, mask=at < length, other=-1)
    echo = tl.load(echoes + row.to(tl.int64) * echo_row + at, mask=at < length, other=0)
    repeats = (token >= 0) & (size > 0) & (echo >= size - 1)
    tl.store(scores + place + token, -3.4028234663852886e38, mask=repeats)


@triton.jit
def _append(
    tokens, echoes, before, numbers, chosen, width, count, echo_row, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    wait_for_previous(EARLY)
    row = tl.program_id(1)
    new = tl.load(chosen + tl.load(numbers + row)).to(tl.int32)
    slot = tl.load(numbers + count + row) * width
    length = tl.load(numbers + 2 * count + row)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    if before is not None:
        token = tl.load(tokens + slot + at, mask=inside, other=-1)
        echo = tl.load(before + row.to(tl.int64) * echo_row + at, mask=inside, other=0)
        tl.store(echoes + slot + at + 1, tl.where(token == new, echo + 1, 0), mask=inside)
    tl.store(tokens + slot + at, new, mask=at == length)
