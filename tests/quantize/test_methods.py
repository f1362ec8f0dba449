"""The methods as functions of tensors: what each promises, on inputs made to show it."""

import pytest
import torch
from quantize_fakes import dequantized, rtn

from tessera_quantize.methods import (
    DAMPING,
    InputStatistics,
    clipped_grid,
    fit_grid,
    gptq,
    output_error,
    round_to,
    search_scales,
    to_fp8,
)

CPU = torch.device("cpu")
SIZE, OUT, GROUP = 64, 24, 16
FORM = (GROUP, False, torch.float32)


def inputs(x: torch.Tensor) -> InputStatistics:
    statistics = InputStatistics(x.shape[1], CPU)
    for part in x.split(100):
        statistics.add(part, torch.ones(len(part)))
    return statistics


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(seed: int = 1) -> torch.Tensor:
    return random(400, 8, seed=seed) @ random(8, SIZE, seed=seed + 1) + 0.1 * random(400, SIZE, seed=seed + 2)


def test_the_error_is_that_of_the_outputs_themselves_and_a_row_counts_as_its_weight_says():
    x, difference, weights = correlated(), random(OUT, SIZE), random(400).abs()
    statistics, shares = InputStatistics(SIZE, CPU), weights / weights.sum()
    for part in (slice(100), slice(100, 400)):
        statistics.add(x[part], weights[part])
    expected = ((x @ difference.T).pow(2).sum(1) * shares).sum()
    assert output_error(difference, statistics.hessian) == pytest.approx(float(expected), rel=1e-4)
    assert torch.allclose(statistics.magnitudes, (x.abs() * shares[:, None]).sum(0), rtol=1e-4)


def test_rounding_by_hand():
    weight = torch.tensor([[0.0, -0.7, 0.8, -0.1, 3.1, 1.5, 6.0, 1.7, 0.0, 0.0, 0.0, 0.0]])
    asymmetric = rtn(weight, 4, False, torch.float32)
    # -0.7..0.8 in steps of 0.1, zero at 7; 0..6 in steps of 0.4, zero at 0; nothing but zeros
    assert asymmetric.codes.tolist() == [[7, 0, 15, 6, 8, 4, 15, 4, 0, 0, 0, 0]]
    assert asymmetric.zeros.tolist() == [[7, 0, 0]]
    assert asymmetric.scales[0].tolist() == pytest.approx([0.1, 0.4, 1])
    symmetric = rtn(weight, 4, True, torch.float32)
    assert symmetric.zeros.tolist() == [[8, 8, 8]]
    assert symmetric.scales[0].tolist() == pytest.approx([1.6 / 15, 0.8, 1])
    assert symmetric.codes.tolist() == [[8, 1, 15, 7, 12, 10, 15, 10, 8, 8, 8, 8]]


def test_awq_finds_scales_where_some_columns_matter_more():
    x = correlated()
    x[:, ::9] *= 30
    weight, statistics = random(OUT, SIZE), inputs(x)
    scales = search_scales([weight[:10], weight[10:]], statistics, *FORM)
    assert scales.std() > 0
    plain = dequantized(rtn(weight, *FORM))
    scaled = dequantized(rtn(weight * scales, *FORM)) / scales
    errors = [output_error(each - weight, statistics.hessian) for each in (plain, scaled)]
    assert errors[1] < 0.6 * errors[0]


def test_clipping_lessens_each_group_s_own_error():
    weight, statistics = random(OUT, SIZE) ** 3, inputs(correlated())
    plain = fit_grid(weight, *FORM)
    clipped = clipped_grid(weight, statistics, *FORM)
    assert (clipped.scales < plain.scales).any() and not (clipped.scales > plain.scales).any()
    for group in range(SIZE // GROUP):
        columns = slice(group * GROUP, (group + 1) * GROUP)
        hessian = statistics.hessian[columns, columns]
        errors = [
            output_error(dequantized(round_to(grid, weight, FORM[2]))[:, columns] - weight[:, columns], hessian)
            for grid in (plain, clipped)
        ]
        assert errors[1] < errors[0]


def test_gptq_equals_its_definition_column_by_column():
    """The blocked updates against the inverse of the remaining Hessian, computed afresh for each column."""
    size, group = 160, 32  # more than one block
    weight = random(6, size)
    statistics = inputs(random(500, size, seed=4) @ (torch.eye(size) + 0.1 * random(size, size, seed=5)))
    grid = fit_grid(weight, group, False, torch.float32)
    made = gptq(weight, statistics, grid, torch.float32)
    hessian = statistics.hessian.double()
    hessian += DAMPING * hessian.diagonal().mean() * torch.eye(size)
    order = statistics.hessian.diagonal().argsort(descending=True, stable=True).tolist()
    left, codes = weight.double().clone(), torch.zeros(6, size)
    for place, column in enumerate(order):
        rest = order[place:]
        inverse = torch.linalg.inv(hessian[rest][:, rest])
        scale, zero = grid.scales[:, column // group].double(), grid.zeros[:, column // group].double()
        codes[:, column] = (left[:, column] / scale + zero).round().clamp(0, 15)
        error = (left[:, column] - (codes[:, column] - zero) * scale) / inverse[0, 0]
        left[:, rest] -= error[:, None] * inverse[0]
    assert (made.codes != codes).float().mean() < 0.01  # float32 may fall on the other side of a half
    assert torch.equal(made.scales, grid.scales) and torch.equal(made.zeros.float(), grid.zeros)


def test_fp8_uses_the_whole_range_of_each_channel():
    weight = random(OUT, SIZE) * torch.logspace(-3, 2, OUT)[:, None]
    assert to_fp8(weight, torch.float32).values.float().abs().amax(1).eq(448).all()
    made = to_fp8(weight, torch.bfloat16)
    assert made.values.dtype == torch.float8_e4m3fn and made.scales.dtype == torch.bfloat16
    relative = (dequantized(made) - weight).abs() / weight.abs().amax(1, keepdim=True)
    assert relative.max() < 1 / 27  # half a step of three bits at the top
    assert dequantized(to_fp8(torch.zeros(2, 4), torch.bfloat16)).eq(0).all()
