"""The layout of 4-bit weights that the kernel of :mod:`tessera.kernels.w4a16` streams, made once at load.

Columns come in blocks of four chunks. A word of 16 bits holds the codes of one row at the same place of a block's four
chunks, the first chunk in the lowest bits: two neighbouring words, one register, are unpacked by a shift and a mask
into neighbouring columns of one chunk, and nothing moves between threads. The words of a block of columns lie
together for all rows, so that a tile of weights is one contiguous piece of memory.

A group's scale and zero point are one word of 32 bits: the scale's float32, its last five bits replaced by the zero
point. Scales that were float16 or bfloat16 have zeros there, so they stay exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

CHUNKS = (64, 32, 16)  # columns; a block has four of them
COLUMN_MULTIPLE = 4 * CHUNKS[-1]
ZERO_BITS = 5  # zero points are 0 .. 16: GPTQ's first format stores them less one
_PIECE = 1 << 24  # codes widened at a time


class PackedW4(NamedTuple):
    """W [n, k] = (code - zero) * scale.

    ``codes`` int16 [blocks, n, chunk], ``words`` int32 [groups, n]; ``arrivals`` int32 [n] are zero whenever no kernel
    runs: programs that share a tile count themselves there.
    """

    codes: torch.Tensor
    words: torch.Tensor
    arrivals: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """n and k."""
        blocks, n, chunk = self.codes.shape
        return n, 4 * blocks * chunk

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // len(self.words)


def chunk_of(k: int, group: int) -> int | None:
    """The columns of a chunk for k columns in groups of ``group``, or None where the layout cannot hold them.

    Blocks divide k, chunks divide groups, and of a block and a group one divides the other.
    """
    for chunk in CHUNKS:
        if k % (4 * chunk) == 0 and k % group == 0 and (group in (chunk, 2 * chunk) or group % (4 * chunk) == 0):
            return chunk
    return None


def zeros_fit(zeros: torch.Tensor) -> bool:
    """Whether all zero points are integers that the layout can hold."""
    return bool(((zeros == zeros.round()) & (zeros >= 0) & (zeros < 1 << ZERO_BITS)).all())


def pack(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> PackedW4:
    """codes uint8 [n, k] of 0 .. 15, scales and zeros [n, groups] -> the layout, on their device.

    Raises:
        ValueError: shapes that the layout cannot hold, or a zero point that is no integer of 0 .. 31.
    """
    (n, k), groups = codes.shape, scales.shape[1]
    chunk = chunk_of(k, k // groups)
    if chunk is None or k % groups or scales.shape != (n, groups) or zeros.shape != (n, groups):
        raise ValueError(
            f"w4: codes [n, k] with k a multiple of {COLUMN_MULTIPLE}, scales and zeros [n, groups], "
            f"not {list(codes.shape)}, {list(scales.shape)}, {list(zeros.shape)}"
        )
    limit = 1 << ZERO_BITS
    if not zeros_fit(zeros):
        raise ValueError(f"w4: zero points must be integers of 0 .. {limit - 1}")
    packed = codes.new_empty((k // (4 * chunk), n, chunk), dtype=torch.int16)
    for rows in torch.arange(n, device="cpu").split(max(1, _PIECE // k)):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        nibbles = codes[part].view(len(rows), -1, 4, chunk).to(torch.int32)
        word = nibbles[:, :, 0] | nibbles[:, :, 1] << 4 | nibbles[:, :, 2] << 8 | nibbles[:, :, 3] << 12
        packed[:, part] = word.to(torch.int16).transpose(0, 1)
    bits = scales.float().T.contiguous().view(torch.int32) & -limit
    words = bits | zeros.T.to(torch.int32)
    return PackedW4(packed, words, torch.zeros(n, dtype=torch.int32, device=codes.device))


def unpack(weights: PackedW4) -> torch.Tensor:
    """W float32 [n, k]."""
    n, k = weights.shape
    shifts = torch.arange(0, 16, 4, device=weights.codes.device)
    codes = (weights.codes.to(torch.int32)[:, :, None] >> shifts[:, None]) & 15  # [blocks, n, 4, chunk]
    codes = codes.transpose(0, 1).reshape(n, -1, weights.group)
    limit = 1 << ZERO_BITS
    scales = (weights.words & -limit).view(torch.float32).T[:, :, None]
    zeros = (weights.words & limit - 1).T[:, :, None]
    return ((codes - zeros) * scales).reshape(n, k)
