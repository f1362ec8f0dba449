"""The linear layers of experts: how each scheme gives them to the grouped products, and what they are filled from."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from measured_fakes import fill
from packers import awq, gptq

from tessera.checkpoint.config import ExpertsConfig
from tessera.checkpoint.weights import TensorError
from tessera.errors import CheckpointError
from tessera.kernels import reference
from tessera.kernels.fp8_rows import Fp8Rows, quantize_rows, quantize_weight
from tessera.kernels.w4_layout import PackedW4
from tessera.linear.experts import Experts
from tessera.linear.formats.fp8 import Fp8, Fp8OnLoad
from tessera.linear.formats.gptq import Awq, Gptq
from tessera.linear.formats.int4 import Int4
from tessera.linear.scheme import LinearScheme
from tessera.linear.unquantized import Unquantized

EXPERTS, PICKED, HIDDEN, INNER = 4, 2, 128, 64
CONFIG = ExpertsConfig(EXPERTS, PICKED, INNER, True, decoder_sparse_step=1, mlp_only_layers=())
GENERATOR = torch.Generator().manual_seed(3)
GATES = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=GENERATOR) / HIDDEN**0.5
DOWNS = torch.randn(EXPERTS, HIDDEN, INNER, generator=GENERATOR) / INNER**0.5
X = torch.randn(9, HIDDEN, generator=GENERATOR)
SCORES = torch.randn(9, EXPERTS, generator=GENERATOR)


def experts(scheme: Callable[[], LinearScheme], down: bool = False) -> Experts:
    kind, cpu = "down" if down else "gate_up", torch.device("cpu")
    return Experts("experts.", kind, HIDDEN, CONFIG, lambda modules: scheme(), torch.float32, cpu)


def stored(down: bool = False) -> dict[str, torch.Tensor]:
    """Each expert's weights by module."""
    if down:
        return {f"experts.{number}.down_proj": weight for number, weight in enumerate(DOWNS)}
    parts = {"gate": GATES[:, :INNER], "up": GATES[:, INNER:]}
    return {f"experts.{number}.{part}_proj": parts[part][number] for number in range(EXPERTS) for part in parts}


def weights(down: bool = False) -> dict[str, torch.Tensor]:
    return {f"{module}.weight": weight for module, weight in stored(down).items()}


def packed(form: object, down: bool = False) -> dict[str, torch.Tensor]:
    return {
        f"{module}.{leaf}": tensor
        for module, weight in stored(down).items()
        for leaf, tensor in form.pack(weight)[0].items()  # type: ignore[attr-defined]
    }


def output(gate_up: Experts, down: Experts) -> torch.Tensor:
    routing = reference.route(SCORES, PICKED, True)
    gated = reference.grouped_gate_up(*gate_up.operands(X), routing)
    assert isinstance(gated, torch.Tensor)
    return reference.grouped_down(*down.operands(gated, routing), routing).product()


def one_by_one(
    gates: torch.Tensor, downs: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Every token by its experts, in plain torch."""
    likely, ids = SCORES.softmax(-1).topk(PICKED)
    rows = []
    for x, shares, chosen in zip(X, likely / likely.sum(-1, keepdim=True), ids, strict=True):
        row = torch.zeros(HIDDEN)
        for share, expert in zip(shares, chosen, strict=True):
            gate, up = F.linear(rounded(x[None]), gates[expert]).chunk(2, dim=-1)
            row += share * F.linear(rounded(F.silu(gate) * up), downs[expert])[0]
        rows.append(row)
    return torch.stack(rows)


def test_each_token_sees_its_experts() -> None:
    layers = fill(experts(Unquantized), weights()), fill(experts(Unquantized, True), weights(True))
    torch.testing.assert_close(output(*layers), one_by_one(GATES, DOWNS, lambda x: x))
    assert [layer.products_a_token for layer in layers] == [PICKED * 2 * INNER * HIDDEN, PICKED * INNER * HIDDEN]


@pytest.mark.parametrize("units", [False, True])
def test_fp8(monkeypatch: pytest.MonkeyPatch, units: bool) -> None:
    """With FP8 units rows and weights stay in e4m3; elsewhere the same is computed in float32."""
    monkeypatch.setattr(Fp8, "_has_units", lambda scheme, layer: units)
    layers = fill(experts(Fp8OnLoad), weights()), fill(experts(Fp8OnLoad, True), weights(True))
    assert all(isinstance(each, Fp8Rows) == units for each in layers[0].operands(X))
    wide = [
        torch.stack([Fp8Rows(values, scales[:, None]).dequantized() for values, scales in map(quantize_weight, each)])
        for each in (GATES, DOWNS)
    ]
    expected = one_by_one(*wide, lambda x: quantize_rows(x).dequantized())
    # A value between two steps of e4m3 may take either, by the order of sums.
    torch.testing.assert_close(output(*layers), expected, atol=2e-3, rtol=0)


def test_four_bits_are_packed_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU; they compute what the dequantized weights do, which other devices keep."""
    monkeypatch.setattr("tessera.linear.formats.int4.has_units", lambda layer: True)  # and room for copies
    monkeypatch.setattr("tessera.linear.formats.int4._half_is_free", lambda device: True)
    form, answers = awq(32), []
    for packs in (False, True):
        monkeypatch.setattr(Int4, "_packs", lambda scheme, layer, packs=packs: packs)
        layers = [fill(experts(lambda: Awq(32), down), packed(form, down)) for down in (False, True)]
        assert isinstance(layers[0].operands(X)[1], PackedW4) == packs
        assert not packs or all(layer.weight is None for layer in layers)
        answers.append(output(*layers))
        if packs:  # many tokens are multiplied by dequantized weights
            monkeypatch.setattr("tessera.linear.formats.int4._MANY_TOKENS", 0)
            assert isinstance(layers[0].operands(X)[1], torch.Tensor)
            answers.append(output(*layers))
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0])


def test_columns_scattered_alike_are_read_and_others_refused() -> None:
    """GPTQ's activation order is each expert's own, where it was calibrated on its own tokens."""
    layer = fill(experts(lambda: Gptq(32, 1, True)), packed(gptq(32, True, desc_act=True)))
    assert layer.weight.shape == (EXPERTS * 2 * INNER, HIDDEN)
    tensors = packed(gptq(32, True, desc_act=True))
    tensors |= {name: tensor for name, tensor in packed(gptq(32, True)).items() if name.startswith("experts.3.")}
    with pytest.raises(CheckpointError, match=r"columns differ from those of experts\.0\.gate_proj, .*, which have"):
        fill(experts(lambda: Gptq(32, 1, True)), tensors)


@pytest.mark.parametrize("scheme", [Unquantized, Fp8OnLoad])
def test_all_of_them_in_one_tensor(scheme: Callable[[], LinearScheme]) -> None:
    alone = fill(experts(scheme), weights())
    together = fill(experts(scheme), {"experts.gate_up_proj": GATES})
    for (name, found), (_, expected) in zip(together.named_buffers(), alone.named_buffers(), strict=True):
        assert torch.equal(found, expected), name


def test_what_one_tensor_may_not_be() -> None:
    """Gates and ups have as many rows as columns here, so only the downs tell what is transposed."""
    for tensor, why in ((GATES[1:], r"has shape \[3, 128, 128\]"), (GATES.byte(), "stored as")):
        with pytest.raises(TensorError, match=why) as caught:
            fill(experts(Unquantized), {"experts.gate_up_proj": tensor})
        assert caught.value.name == "experts.gate_up_proj"
    assert "experts.gate_up_proj" not in experts(lambda: Awq(32)).targets({"experts.gate_up_proj"})
    with pytest.raises(TensorError, match=r"has shape \[4, 64, 128\], expected \[4, 128, 64\]"):
        fill(experts(Unquantized, True), {"experts.down_proj": DOWNS.mT})
