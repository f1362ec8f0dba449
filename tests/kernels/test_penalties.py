"""Penalties and what is remembered for them, against their twins."""

from collections.abc import Sequence

import pytest
import torch

from tessera.kernels import reference
from tessera.kernels.operands import PenaltyLines

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.engine.execution.penalties import echoes
from tessera.kernels.penalties import append_tokens, penalized

VOCABULARY, WIDTH = 40, 200
# Of each row: its place in the step, its line, the tokens that it knows, those of them that are a draft's.
ROWS = [(8, 4, 0, 0), (0, 0, 1, 0), (2, 5, 64, 0), (6, 2, 130, 0), (3, 1, 198, 0), (4, 1, 199, 1)]
ROWS += [(9 + drafted, 3, 69 + drafted, drafted) for drafted in range(4)]
STEP = 13
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


def rows_of(rows: list[tuple[int, ...]], device: torch.device, drafts: Sequence[int] = ()) -> torch.Tensor:
    """``drafts``: the tokens behind the rows, -2 for none. In memory that has room for more rows."""
    drafts = drafts or [-2] * len(rows)
    given = torch.tensor([(*row, 1, token) for row, token in zip(rows, drafts)], device=device).T
    return torch.cat([given, given], dim=1)[:, : len(rows)]


def test_penalized(dtype, device, generator, lines):
    logits = torch.randn((STEP, VOCABULARY + 3), generator=generator, device=device).to(dtype)[:, :VOCABULARY]
    logits[2, 2] = float("nan")
    rows = rows_of(ROWS, device)
    found, expected = penalized(logits, lines, rows), reference.penalized(logits, lines, rows)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert torch.equal(found[5], logits[5].float()), "nobody asked there"
    assert (found[6] != logits[6].float()).any(), "of this row repeated n-grams alone are forbidden"
    with pytest.raises(ValueError, match="not contiguous"):
        penalized(logits.T, lines, rows)


def test_append_tokens(device, generator, lines):
    """Behind drafts of which nothing is right, and two tokens of three."""
    chosen = torch.randint(0, 3, (STEP,), generator=generator, device=device)
    drafts = [-2] * len(ROWS)
    drafts[4], drafts[6:9] = int(chosen[3]) + 1, [int(chosen[9]), int(chosen[10]), int(chosen[11]) + 1]
    rows, results = rows_of(ROWS, device, drafts), []
    last = [row for row in ROWS if row[0] not in (4, 9, 10, 12)]
    for append in (append_tokens, reference.append_tokens):
        changed = lines._replace(tokens=lines.tokens.clone(), echoes=lines.echoes.clone())
        append(changed, rows, chosen)
        for _, line, length, _ in last:  # what lies behind means nothing, nor what nobody reads
            changed.tokens[line, length + 1 :] = changed.echoes[line, length + 1 :] = 0
            changed.echoes[line, 0] = 0
            changed.echoes[line] *= SIZES[line] > 1
        results.append(changed)
    assert torch.equal(results[0].tokens, results[1].tokens) and torch.equal(results[0].echoes, results[1].echoes)
    appended = [int(results[0].tokens[line, length]) for _, line, length, _ in last]
    assert appended == [int(chosen[place]) for place, *_ in last]


@pytest.mark.parametrize("append", [append_tokens, reference.append_tokens])
def test_echoes_are_those_of_all_tokens(device, generator, append):
    """A token behind none, one and two of a draft, in turn."""
    tokens = torch.randint(0, 2, (1, 90), generator=generator, device=device, dtype=torch.int32)
    lines = PenaltyLines(tokens, torch.zeros_like(tokens), torch.tensor([[0], [2]], device=device), torch.ones(3, 1))
    length = 0
    for drafted in [0, 1, 2] * 12:
        rows = [(place, 0, length + place, place) for place in range(drafted + 1)]
        said = tokens[0, length : length + drafted + 1].long()
        append(lines, rows_of(rows, device, [*said.tolist()[:-1], -2]), said)
        length += drafted + 1
        assert lines.echoes[0, 1:length].tolist() == echoes(tokens[0, :length].cpu().numpy())[1:]
