"""A row's product has the same bits among any number of rows, at any place, where FixedRows is entered."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tessera.errors import ConfigError
from tessera.kernels import fixed_rows
from tessera.kernels.fixed_rows import ROWS, FixedRows
from tessera.linear.formats.fp8 import Fp8, Fp8OnLoad
from tessera.linear.formats.gptq import Gptq
from tessera.linear.scheme import Linear, LinearScheme


def products(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    """Of the first row, among others of all numbers up to those of ``x``, and at all places among these."""
    first = [F.linear(x[:count], weight, bias)[0] for count in range(1, len(x) + 1)]
    return first + [F.linear(x.roll(place, 0), weight, bias)[place] for place in range(len(x))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_know_nothing_of_the_others(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((40, 96), (130, 96), (130,)))
    with FixedRows():
        found = products(x, weight, bias)
        assert F.linear(x[:0], weight, bias).shape == (0, 130)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], F.linear(x, weight, bias)[0])


@pytest.mark.parametrize("scheme", [Fp8OnLoad, partial(Fp8, blocks=True), partial(Gptq, 16, 1, symmetric=True)])
def test_nor_those_of_a_quantized_layer(scheme: Callable[[], LinearScheme]) -> None:
    layer = Linear(96, {"layer": slice(0, 130)}, True, lambda modules: scheme(), torch.bfloat16, torch.device("cpu"))
    layer.randomize(torch.Generator().manual_seed(1))
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    with FixedRows():
        found = [layer(x[:count])[0] for count in range(1, 41)] + [layer(x.roll(n, 0))[n] for n in range(40)]
    assert all(torch.equal(each, found[0]) for each in found)


def test_a_library_that_computes_rows_by_their_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(x: torch.Tensor, *how: torch.Tensor) -> torch.Tensor:
        return F.linear(x, *how) + (torch.arange(len(x)) == ROWS - 1)[:, None] * 1e-3

    monkeypatch.setattr(fixed_rows, "F", SimpleNamespace(linear=by_place, pad=F.pad))
    with pytest.raises(ConfigError, match=rf"on this CPU {ROWS} equal rows times weights \[5, 4\] of torch.float32"):
        FixedRows()._linear(torch.ones(2, 4), torch.randn(5, 4))


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_a_library_that_splits_k_is_found_out_by_few_rows_too(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Of 256 values a row, rounded to bfloat16, in which another order of a sum seldom shows."""
    weight, like = torch.randn(256, 1024).bfloat16(), torch.empty(rows, 1024).bfloat16()

    def in_one(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x.float(), weight.float()).bfloat16()

    def in_two(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        halves = zip(x.float().chunk(2, 1), weight.float().chunk(2, 1))
        return out.copy_(sum(F.linear(*half) for half in halves))

    monkeypatch.setattr(fixed_rows, "_of_library", in_two)
    assert not fixed_rows._library_has_bits_of(in_one, like, weight, None)
    monkeypatch.setattr(fixed_rows, "_of_library", lambda x, weight, bias, out: in_one(x, weight, bias))
    assert fixed_rows._library_has_bits_of(in_one, like, weight, None)
