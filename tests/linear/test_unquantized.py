"""Plain weights: which product is measured against the library's, and which one runs from then on."""

from types import SimpleNamespace

import pytest
import torch
from measured_fakes import Choices

from tessera.kernels import reference
from tessera.kernels.fixed_rows import FixedRows
from tessera.kernels.fp8_rows import Fp8Rows
from tessera.linear import unquantized
from tessera.linear.scheme import Linear, LinearShape
from tessera.linear.tuning import choose
from tessera.linear.unquantized import CUBLAS, EARLY, FEW_ROWS, FUSED, Unquantized

pytest.importorskip("triton", reason="tuning measures triton's kernels")

SIZE, K, STEP = 16, 64, 8192


def choices_of(*won):
    """Ours wins with the given numbers of rows."""
    return Choices(lambda rows, ways: ways[-1] if rows in won else ways[0])


@pytest.fixture
def ran(monkeypatch):
    """The kernels of few and of many rows that ran, by name; the twins compute."""
    calls: list[str] = []

    def named(name):
        return lambda *given: (calls.append(name), getattr(reference, name)(*given))[1]

    names = ("skinny_deferred", "skinny_gate_up", "gate_up_silu")
    kernels = SimpleNamespace(**vars(reference) | {name: named(name) for name in names})
    monkeypatch.setattr(unquantized, "layer_kernels", lambda device: kernels)
    return calls


def tuned(choices, *, size=SIZE, k=K, bias=False, place="gate_up", dtype=torch.bfloat16, most_rows=STEP):
    layers = [
        Linear(k, {"w": slice(0, 2 * size)}, bias, lambda names: Unquantized(), dtype, torch.device("cpu"))
        for _ in range(2)
    ]
    for layer in layers:
        layer.randomize(torch.Generator().manual_seed(1))
    shape = LinearShape(2 * size, k, bias, place, dtype, most_rows)
    choose(layers, shape, choices, "here")
    return layers


@pytest.mark.parametrize("won", [(8192, 4096, 2048, 1024), (8192, 4096, 1024), (4096, 2048), ()])
def test_each_number_of_rows_is_measured_and_holds_down_to_the_one_before(ran, won):
    choices = choices_of(32, 16, *won)
    layers = tuned(choices)
    many = (1024, 2048, 4096, 8192)
    ours = dict.fromkeys((16, 32, 64), FEW_ROWS) | dict.fromkeys(many, FUSED)
    assert choices.by_rows == {rows: [CUBLAS, way] for rows, way in ours.items()}
    assert all(question.endswith(", 2 layers, here") for question in choices.asked)
    for layer in layers:
        ways = {rows: layer.scheme.way(layer, rows) for rows in (1, 32, 33, 64, 65, 512)}
        assert ways == {1: FEW_ROWS, 32: FEW_ROWS, 33: CUBLAS, 64: CUBLAS, 65: CUBLAS, 512: CUBLAS}
        for rows in many:
            found = {layer.scheme.way(layer, each) for each in (rows // 2 + 1, rows)}
            assert found == {FUSED if rows in won else CUBLAS}
        assert layer.scheme.way(layer, 9000) == (FUSED if 8192 in won else CUBLAS)


@pytest.mark.parametrize(("place", "found"), [("gate_up", [FEW_ROWS, CUBLAS, FUSED]), ("qkv", [CUBLAS] * 3)])
def test_where_bits_are_fixed_nothing_is_measured(ran, place, found):
    choices = choices_of(16, 8192)
    with FixedRows():
        layers = tuned(choices, place=place)
    assert not choices.asked
    for layer in layers:
        for rows, way in zip(((1, 64), (65, 4095), (4096, 9000)), found, strict=True):
            assert {layer.scheme.way(layer, each) for each in rows} == {way}


def test_early_products_are_measured_where_they_fit(ran):
    """Up to 16 rows, in bfloat16, of a k that is a multiple of 128."""
    for options, early in ((dict(k=256), True), (dict(k=192), False), (dict(k=256, dtype=torch.float16), False)):
        choices = choices_of()
        tuned(choices, **options)
        assert [rows for rows, ways in choices.by_rows.items() if EARLY in ways] == [16] * early


def test_it_runs_from_the_found_number_of_rows_on(ran):
    layer = tuned(choices_of(16, 8192, 4096))[1]
    ran.clear()
    for rows, kernels in {0: [], 16: ["skinny_gate_up"], 17: [], 2048: [], 2049: ["gate_up_silu"]}.items():
        x = torch.randn(rows, K).bfloat16()
        torch.testing.assert_close(layer.gated(x), reference.gate_up_silu(x, layer.weight))
        assert ran == kernels
        ran.clear()
    assert isinstance(layer.gated(torch.randn(4096, K).bfloat16(), fp8=True), Fp8Rows)
    layer(torch.randn(4096, K).bfloat16())
    assert not ran


@pytest.mark.parametrize(
    ("layer", "asked"),
    [
        (dict(most_rows=5000), [1024, 2048, 4096]),  # for more there is no memory
        (dict(most_rows=1000), []),
        (dict(k=40), [1024, 2048, 4096, 8192]),
        (dict(k=36), []),
        (dict(size=12), []),
        (dict(bias=True), []),
        (dict(dtype=torch.float32), []),
        (dict(place="qkv"), []),
    ],
)
def test_it_is_measured_only_where_it_can_run(ran, layer, asked):
    choices = choices_of(8192, 4096, 2048, 1024)
    found = tuned(choices, **layer)
    assert [rows for rows, ways in choices.by_rows.items() if FUSED in ways] == asked
    assert found[0].scheme.way(found[0], 5000) == (FUSED if asked else CUBLAS)
