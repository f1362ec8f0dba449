"""Picture rows between the stages keep their bits, or become bfloat16."""

from __future__ import annotations

import torch

from tessera.tritonserver.tensors import packed, unpacked


def test_float32_rows_arrive_bit_for_bit() -> None:
    rows = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))[::2]  # not contiguous
    rows[0, 0], rows[1, 1] = 1e-40, torch.inf
    sent = packed(rows)
    assert (sent.dtype, sent.shape) == (torch.bfloat16, (3, 20)) and sent.is_contiguous()
    assert torch.equal(unpacked(sent, 10), rows)


def test_narrow_rows_are_bfloat16() -> None:
    rows = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.bfloat16, torch.float16):
        sent = packed(rows.to(dtype))
        assert sent.dtype == torch.bfloat16 and torch.equal(sent, rows.to(dtype).bfloat16())
        assert unpacked(sent, 10) is sent
