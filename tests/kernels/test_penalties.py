"""Penalties and what is remembered for them, against their twins."""

import pytest
import torch

from tessera.kernels import reference
from tessera.kernels.operands import PenaltyLines

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.engine.execution.penalties import echoes
from tessera.kernels.penalties import append_tokens, penalized

VOCABULARY, WIDTH = 40, 200
# Of each row: its place in the step, its line, the tokens that it knows, those of them that are a draft's.
ROWS = [(6, 4, 0, 0), (0, 0, 1, 0), (2, 5, 64, 0), (5, 2, 130, 0), (3, 1, 199, 1), (1, 3, 70, 1), (7, 3, 72, 3)]
PROMPTS, SIZES = [1, 128, 3, 1, 0, 60], [3, 0, 2, 3, 0, 1]  # of each line


@pytest.fixture
def lines(device: torch.device, generator: torch.Generator) -> PenaltyLines:
    """Of few different tokens, so that they repeat, among them pictures."""
    size = len(SIZES), WIDTH
    tokens = torch.randint(-2, 3, size, generator=generator, device=device, dtype=torch.int32)
    echoes = torch.randint(0, 3, size, generator=generator, device=device, dtype=torch.int32)
    facts = torch.tensor([PROMPTS, SIZES], device=device)
    amounts = [[1.2, 2, 1, 0.5, 1, 1], [0.5, 0, 0, -1, 0, 0], [0, -0.5, 0, 0.25, 0, 0]]
    return PenaltyLines(tokens, echoes, facts, torch.tensor(amounts, device=device))


def rows_of(rows: list[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    return torch.tensor([(*row, 1) for row in rows], device=device).T.contiguous()


def test_penalized(dtype, device, generator, lines):
    logits = torch.randn((8, VOCABULARY + 3), generator=generator, device=device).to(dtype)[:, :VOCABULARY]
    logits[2, 2] = float("nan")
    rows = rows_of(ROWS, device)
    found, expected = penalized(logits, lines, rows), reference.penalized(logits, lines, rows)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert torch.equal(found[4], logits[4].float()), "nobody asked there"
    assert (found[5] != logits[5].float()).any(), "of this row repeated n-grams alone are forbidden"
    with pytest.raises(ValueError, match="not contiguous"):
        penalized(logits.T, lines, rows)


def test_append_tokens(device, generator, lines):
    chosen = torch.randint(0, 3, (8,), generator=generator, device=device)
    rows, results = rows_of(ROWS[:-1], device), []
    for append in (append_tokens, reference.append_tokens):
        changed = lines._replace(tokens=lines.tokens.clone(), echoes=lines.echoes.clone())
        append(changed, rows, chosen)
        for _, line, length, _ in ROWS[:-1]:  # what lies behind means nothing, nor what nobody reads
            changed.tokens[line, length + 1 :] = changed.echoes[line, length + 1 :] = 0
            changed.echoes[line, 0] = 0
            changed.echoes[line] *= SIZES[line] > 1
        results.append(changed)
    assert torch.equal(results[0].tokens, results[1].tokens) and torch.equal(results[0].echoes, results[1].echoes)
    appended = [int(results[0].tokens[line, length]) for _, line, length, _ in ROWS[:-1]]
    assert appended == [int(chosen[place]) for place, *_ in ROWS[:-1]]


@pytest.mark.parametrize("append", [append_tokens, reference.append_tokens])
def test_echoes_are_those_of_all_tokens(device, generator, append):
    """A token behind none, one and two of a draft, in turn."""
    tokens = torch.randint(0, 2, (1, 90), generator=generator, device=device, dtype=torch.int32)
    lines = PenaltyLines(tokens, torch.zeros_like(tokens), torch.tensor([[0], [2]], device=device), torch.ones(3, 1))
    length = 0
    for drafted in [0, 1, 2] * 12:
        append(lines, rows_of([(0, 0, length + drafted, drafted)], device), tokens[0, length + drafted :].long())
        length += drafted + 1
        assert lines.echoes[0, 1:length].tolist() == echoes(tokens[0, :length].cpu().numpy())[1:]
