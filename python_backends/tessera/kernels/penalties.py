"""Penalties on what a sequence has said, and n-grams that it may not say twice: a launch or two in place of thirty.

With few sequences a penalized step takes as long as the host needs to launch it, not as the GPU needs to run it: a
launch takes tens of microseconds on some hosts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.kernels.fp8 import early_launch, wait_for_previous
from tessera.kernels.operands import PenaltyLines

_BLOCK, _COUNTED = 64, 128  # places of a program at a time, and answered ones that they are compared with
_MOST_PROGRAMS = 64  # of a row, however long its line is: most of the programs of short ones would find nothing to do


def penalized(logits: torch.Tensor, lines: PenaltyLines, rows: torch.Tensor) -> torch.Tensor:
    """logits of any float dtype [m, vocabulary], rows contiguous -> float32 [m, vocabulary], changed in ``rows`` alone.

    Each token that a row's line holds is penalized once: by the repetition penalty, times or over, then the answer's
    own by frequency and presence. What would end an n-gram that is there already is float32's lowest. ValueError for
    rows that are not contiguous.
    """
    if logits.stride(1) != 1:
        raise ValueError(f"rows of logits are not contiguous: strides {logits.stride()}")
    scores = logits.to(torch.float32, copy=True)
    grid, sizes = _grid(lines, rows), (logits.shape[1], *lines.tokens.shape, rows.stride(0))
    options = {"BLOCK": _BLOCK, **early_launch(logits.device)}
    given = logits, scores, lines.tokens, lines.facts, lines.amounts, rows, logits.stride(0)
    _penalize[grid](*given, *sizes, COUNTED=_COUNTED, **options)
    _forbid[grid](scores, lines.tokens, lines.echoes, lines.facts, rows, *sizes, **options)
    return scores


def append_tokens(lines: PenaltyLines, rows: torch.Tensor, chosen: torch.Tensor) -> None:
    """Puts behind each line the one of ``chosen`` int64 [m] that follows all of its draft that was right, and lengthens
    its echoes."""
    given = lines.tokens, lines.echoes, lines.facts, rows, chosen, *lines.tokens.shape, rows.stride(0)
    _append[_grid(lines, rows)](*given, BLOCK=_BLOCK, **early_launch(chosen.device))


def _grid(lines: PenaltyLines, rows: torch.Tensor) -> tuple[int, int]:
    """The same for rows of any length, so that a CUDA graph may hold it."""
    return min(triton.cdiv(lines.tokens.shape[1], _BLOCK), _MOST_PROGRAMS), rows.shape[1]


@triton.jit
def _penalize(
    logits, scores, tokens, facts, amounts, numbers, logits_row, vocabulary, lines, width, count,
    BLOCK: tl.constexpr, COUNTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row = tl.program_id(1)
    place = tl.load(numbers + row)
    slot = tl.load(numbers + count + row)
    line = tokens + slot * width
    length = tl.load(numbers + 2 * count + row).to(tl.int32)
    prompt = tl.load(facts + slot).to(tl.int32)
    repetition = tl.load(amounts + slot)
    frequency = tl.load(amounts + lines + slot)
    presence = tl.load(amounts + 2 * lines + slot)
    for begin in range(tl.program_id(0) * BLOCK, length, tl.num_programs(0) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
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
    scores, tokens, echoes, facts, numbers, vocabulary, lines, width, count, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    wait_for_previous(EARLY)
    row = tl.program_id(1)
    place = tl.load(numbers + row) * vocabulary
    slot = tl.load(numbers + count + row)
    line = tokens + slot * width
    length = tl.load(numbers + 2 * count + row).to(tl.int32)
    drafted = tl.load(numbers + 3 * count + row).to(tl.int32)
    size = tl.load(facts + lines + slot)
    if size > 0:
        for begin in range(tl.program_id(0) * BLOCK, length, tl.num_programs(0) * BLOCK):
            distance = 1 + begin + tl.arange(0, BLOCK)
            echo = _echo(line, echoes + slot * width, length, drafted, distance)
            token = tl.load(line + length - distance, mask=distance <= length, other=-1)
            tl.store(scores + place + token, -3.4028234663852886e38, mask=(token >= 0) & (echo >= size - 1))


@triton.jit
def _append(
    tokens, echoes, facts, numbers, chosen, lines, width, count, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    wait_for_previous(EARLY)
    row = tl.program_id(1)
    behind = chosen + tl.load(numbers + row)
    new = tl.load(behind).to(tl.int32)
    slot = tl.load(numbers + count + row)
    line = tokens + slot * width
    length = tl.load(numbers + 2 * count + row).to(tl.int32)
    drafted = tl.load(numbers + 3 * count + row).to(tl.int32)
    following = numbers + 5 * count + row
    last = new != tl.load(following)
    for back in range(1, drafted + 1):
        last &= tl.load(behind - back) == tl.load(following - back)
    if last & (tl.load(facts + lines + slot) > 1):
        for begin in range(tl.program_id(0) * BLOCK, length, tl.num_programs(0) * BLOCK):
            distance = 1 + begin + tl.arange(0, BLOCK)
            echo = _echo(line, echoes + slot * width, length, drafted, distance)
            same = tl.load(line + length - distance, mask=distance <= length, other=0) == new
            tl.store(echoes + slot * width + distance, tl.where(same, echo + 1, 0), mask=distance <= length)
    tl.store(line + length, new, mask=last & (tl.program_id(0) == 0))


@triton.jit
def _echo(line, echoes, length, drafted, distance):
    """Those of a line of ``length`` tokens at each distance, whose last ``drafted`` its echoes do not know."""
    begun = length - drafted
    echo = tl.load(echoes + distance, mask=distance < begun, other=0)
    for at in range(begun, length):
        before = tl.load(line + at - distance, mask=distance <= at, other=0)
        echo = tl.where((before == tl.load(line + at)) & (distance <= at), echo + 1, 0)
    return echo
