"""How layers of 4-bit weights run: packed, with an FP8 copy beside them or without, and which way is chosen."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from measured_fakes import fill, prefers

from tessera.kernels.fixed_rows import FixedRows
from tessera.kernels.fp8_rows import Fp8Rows, Fp8Sums
from tessera.kernels.operands import finished
from tessera.linear.formats import int4
from tessera.linear.formats.int4 import DEQUANTIZED, W4A16, Int4, dequantize
from tessera.linear.scheme import PRODUCTS, Linear, LinearShape
from tessera.linear.tuning import choose, layers_alike

ROWS, SIZE, GROUP = {"gate": 32, "up": 32}, 512, 128


class Plain(Int4):
    """Stores the canonical tensors themselves."""

    optional = frozenset({"order"})

    def leaves(self):
        return {"codes", "scales", "zeros"}

    def decode(self, tensors, out_features, in_features):
        columns = self.columns(tensors, "order", in_features, torch.device("cpu"))
        return {name: tensors[name] for name in self.leaves()} | {"columns": columns}


@pytest.fixture
def hopper(monkeypatch):
    """As on a GPU that has the kernel and room for copies; the twins compute."""
    monkeypatch.setattr(Int4, "_packs", lambda scheme, layer: True)
    monkeypatch.setattr(int4, "has_units", lambda layer: True)
    monkeypatch.setattr(int4, "_half_is_free", lambda device: True)


def made(scattered=False, bias=True):
    """A layer, and its W and bias in float32."""
    generator = torch.Generator().manual_seed(3)
    scheme = Plain(GROUP)
    modules = {"gate": slice(0, 32), "up": slice(32, 64)}
    layer = Linear(SIZE, modules, bias, lambda names: scheme, torch.float32, torch.device("cpu"))
    order = torch.randperm(SIZE, generator=generator) // GROUP
    weights, biases, stored = [], [], {}
    for name, rows in ROWS.items():
        codes = torch.randint(0, 16, (rows, SIZE), dtype=torch.uint8, generator=generator)
        scales = torch.rand((rows, SIZE // GROUP), generator=generator).half().float() / 64
        zeros = torch.randint(0, 17, (rows, SIZE // GROUP), generator=generator).float()
        tensors = {"codes": codes, "scales": scales, "zeros": zeros}
        if scattered:
            tensors["order"] = order.int()
        if bias:
            tensors["bias"] = torch.randn(rows, generator=generator)
            biases.append(tensors["bias"])
        stored |= {f"{name}.{leaf}": tensor for leaf, tensor in tensors.items()}
        weights.append(dequantize(codes, scales, zeros, order.argsort(stable=True) if scattered else None))
    return fill(layer, stored), torch.cat(weights), torch.cat(biases) if bias else None


def rows_of(n):
    return torch.randn((n, SIZE), generator=torch.Generator().manual_seed(n))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("scattered", "bias"), [(False, False), (True, True)])
@pytest.mark.parametrize("way", [W4A16, DEQUANTIZED, *PRODUCTS])
def test_every_way_computes_the_product(scattered, bias, way):
    layer, weight, added = made(scattered, bias)
    layer.scheme.ways = ((8, way),)
    exact = F.linear(rows_of(5), weight, added)
    close = (1e-4, 1e-4) if way in (W4A16, DEQUANTIZED) else (0.1, 0.5)  # e4m3 twice
    deferred = layer.deferred(rows_of(5))
    assert isinstance(deferred, Fp8Sums) == (way == "rescaled")  # the copy's scales may be left to the norm
    for product in (layer(rows_of(5)), finished(deferred)):
        torch.testing.assert_close(product, exact, rtol=close[0], atol=close[1])
    gate, up = exact.chunk(2, dim=1)
    torch.testing.assert_close(layer.gated(rows_of(5)), F.silu(gate) * up, rtol=close[0], atol=4 * close[1])
    gated = layer.gated(rows_of(5), fp8=True)
    assert isinstance(gated, Fp8Rows)
    torch.testing.assert_close(gated.dequantized(), layer.gated(rows_of(5)), rtol=0.07, atol=0.07)


@pytest.mark.usefixtures("hopper")
def test_many_rows_take_the_copy_or_all_of_the_weights_again(monkeypatch):
    layer, _, _ = made()
    assert {name for name, _ in layer.named_buffers()} == {"packed", "words", "arrivals", "weight", "scales", "bias"}
    assert [layer.wants_fp8_input(rows) for rows in (0, 1, 64, 65, 8192)] == [True, False, False, True, True]
    monkeypatch.setattr(int4, "_half_is_free", lambda device: False)
    layer, weight, bias = made()
    assert layer.weight is None
    assert not layer.wants_fp8_input(8192)
    torch.testing.assert_close(layer(rows_of(80)), F.linear(rows_of(80), weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("free", [True, False])
def test_the_fastest_way_is_measured_for_each_number_of_rows(monkeypatch, free):
    monkeypatch.setattr(int4, "_half_is_free", lambda device: free)
    layers = [made()[0] for _ in range(2)]
    choices = prefers("rescaled")
    shape = LinearShape(64, SIZE, True, "gate_up", torch.float32)
    choose(layers, shape, choices, "a machine")
    asked = choices.by_rows
    if free:
        assert len(choices.asked) == 8
        assert asked[64] == ["rescaled", "rows", "skinny", W4A16, DEQUANTIZED]
        assert asked[96] == ["rescaled", "rows", "skinny", DEQUANTIZED]
        assert asked[512] == ["rescaled", "rows", DEQUANTIZED]
        best = {16: "rescaled", 1024: "rescaled"}
    else:  # there is nothing to ask about more rows
        assert asked == {rows: [W4A16, DEQUANTIZED] for rows in (16, 32, 64)}
        best = {16: W4A16, 1024: DEQUANTIZED}
    for layer in layers:
        assert {rows: way for rows, way in layer.scheme.ways if rows in best} == best


@pytest.mark.usefixtures("hopper")
def test_where_bits_are_fixed_the_kernel_takes_any_number_of_rows(monkeypatch):
    """Or never any, where it is wrong."""
    layer, choices = made()[0], prefers("rescaled")
    for right, ways in ((True, {W4A16}), (False, {"rows"})):
        monkeypatch.setattr(int4, "_agrees", lambda *_, right=right: right)
        with FixedRows():
            choose([layer], LinearShape(64, SIZE, True, "gate_up", torch.float32), choices, "a machine")
        assert {layer.scheme.way(layer, rows) for rows in (1, 64, 65, 8192)} == ways
    assert not choices.asked


@pytest.mark.usefixtures("hopper")
def test_layers_that_hold_other_things_are_asked_for_by_themselves(monkeypatch):
    """Such as those for which the card had no room any more."""
    layers = []
    for free, scattered in [(True, False), (False, False), (True, True)] * 2:
        monkeypatch.setattr(int4, "_half_is_free", lambda device, free=free: free)
        layers.append(made(scattered)[0])
    choices = prefers("rescaled")
    for shape, alike in layers_alike(dict.fromkeys(layers, "alone")):
        choose(alike, shape, choices, "a machine")
    assert [layer.scheme.way(layer, 1024) for layer in layers] == ["rescaled", DEQUANTIZED, "rescaled"] * 2
    assert len(choices.asked) == 8 + 3 + 8  # without a copy, up to the kernel's 64 rows


def test_the_cpu_dequantizes_for_good():
    layer, weight, bias = made(scattered=True)
    assert {name for name, _ in layer.named_buffers()} == {"weight", "bias"}
    torch.testing.assert_close(layer(rows_of(3)), F.linear(rows_of(3), weight, bias))
    assert not layer.wants_fp8_input(1000)
    choices = prefers(W4A16)
    choose([layer], LinearShape(64, SIZE, True, "qkv", torch.float32), choices, "a machine")
    assert not choices.asked


def raises(y):
    raise RuntimeError("does not compile")


def spoilt(y, rows, columns, value):
    y[rows, columns] = value
    return y


#: what becomes of the kernel's product, and whether the kernel is used then
KERNELS = {
    "rounds single values otherwise": (lambda y: spoilt(y, slice(None), 0, 1.05 * y[:, 0]), True),
    "a tenth too much": (lambda y: 1.1 * y, False),
    "no numbers": (lambda y: y * torch.nan, False),
    "the last column": (lambda y: spoilt(y, slice(None), -1, 0.0), False),
    "the eighth row": (lambda y: spoilt(y, slice(7, None), 0, torch.nan), False),
    "fails": (raises, False),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_is_wrong_is_found_at_the_start_and_not_used(kernel, monkeypatch, caplog):
    layer, _, _ = made()
    (change, used), right = KERNELS[kernel], int4.layer_kernels("cpu")
    tried = vars(right) | {"w4a16_linear": lambda *given: change(right.w4a16_linear(*given))}
    monkeypatch.setattr(int4, "layer_kernels", lambda device: SimpleNamespace(**tried))
    choices = prefers(W4A16)
    place = LinearShape(layer.out_features, SIZE, True, "alone", torch.float32)
    choose([layer], place, choices, "here")
    assert choices.asked and any(W4A16 in ways for ways in choices.asked.values()) == used
    assert (layer.scheme.way(layer, 16) == W4A16) == used
    assert ("not used" in caplog.text) == (not used)
    monkeypatch.setattr(int4, "layer_kernels", lambda device: right)
    choose([layer], place, prefers(W4A16), "here")
    assert layer.scheme.way(layer, 16) == W4A16
