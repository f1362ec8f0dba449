"""Penalties and what is remembered for them, against their twins."""

from __future__ import annotations

import pytest
import torch

from tessera.kernels import reference
from tessera.kernels.operands import PenaltyRows

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels.penalties import append_tokens, penalized

VOCABULARY, LINES, WIDTH = 40, 6, 200
LENGTHS, PROMPTS, SIZES = [0, 1, 64, 130, 199], [0, 1, 60, 3, 128], [0, 3, 1, 2, 0]


@pytest.fixture
def rows(device: torch.device) -> PenaltyRows:
    """Of a step's seven rows five ask; two lines are nobody's."""
    numbers = torch.tensor([[6, 0, 2, 5, 3], [4, 0, 5, 2, 1], LENGTHS, PROMPTS, SIZES], device=device)
    amounts = torch.tensor([[1, 1.2, 0.5, 1, 2], [0, 0.5, -1, 0, 0], [0, 0, 0.25, 0, -0.5]], device=device)
    return PenaltyRows(numbers, amounts, max(LENGTHS))


@pytest.fixture
def tokens(device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Few different ones, among them pictures."""
    return torch.randint(-2, VOCABULARY, (LINES, WIDTH), generator=generator, device=device, dtype=torch.int32)


@pytest.mark.parametrize("ngrams", [False, True])
def test_penalized(dtype, device, generator, rows, tokens, ngrams):
    logits = torch.randn((7, VOCABULARY + 3), generator=generator, device=device).to(dtype)[:, :VOCABULARY]
    logits[2, 4] = float("nan")
    echoes = torch.randint(0, 3, (5, WIDTH), generator=generator, device=device, dtype=torch.int32)
    given = logits.clone(), tokens, rows, echoes if ngrams else None
    found, expected = penalized(*given), reference.penalized(*given)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert torch.equal(found[[1, 4]], logits[[1, 4]].float()), "nobody asked there"
    assert (found[5] != logits[5].float()).any() == ngrams, "of this row repeated n-grams alone are forbidden"
    with pytest.raises(ValueError, match="not contiguous"):
        penalized(logits.T, tokens, rows, None)


@pytest.mark.parametrize("lengthened", [False, True])
def test_append_tokens(device, generator, rows, tokens, lengthened):
    echoes = torch.randint(0, 3, (LINES, WIDTH), generator=generator, device=device, dtype=torch.int32)
    chosen = torch.randint(0, VOCABULARY, (7,), generator=generator, device=device)
    before = echoes[rows.numbers[1], : rows.width] if lengthened else None
    results = []
    for append in (append_tokens, reference.append_tokens):
        held, longer = tokens.clone(), echoes.clone()
        append(held, longer, rows, before, chosen)
        for line, length in zip(rows.numbers[1].tolist(), LENGTHS):  # what lies behind means nothing
            held[line, length + 1 :] = longer[line, length + 1 :] = 0
            longer[line, 0] = 0
        results.append((held, longer))
    for ours, twin in zip(*results):
        assert torch.equal(ours, twin)
    assert results[0][0][rows.numbers[1], rows.numbers[2]].tolist() == chosen[rows.numbers[0]].tolist()
