"""Routing and the grouped products of experts against their twins, for weights of every form."""

from types import SimpleNamespace

import pytest
import torch

from tessera.kernels import reference
from tessera.kernels.fp8_rows import Fp8Rows, quantize_rows
from tessera.kernels.operands import Routing
from tessera.kernels.w4_layout import pack

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels.experts import GroupedPlan, _large, grouped_down, grouped_gate_up, plan_grouped, route

pytestmark = pytest.mark.usefixtures("poisoned_memory")
K, N = 128, 48


def logits(tokens, experts, dtype, device, generator):
    return torch.randn((tokens, experts), dtype=dtype, device=device, generator=generator)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "picked"), [(1, 8, 2), (37, 12, 3), (40, 128, 8), (5, 3, 3), (0, 4, 2)])
def test_routing(dtype, device, generator, tokens, experts, picked, normalize):
    scores = logits(tokens, experts, dtype, device, generator)
    found, expected = route(scores, picked, normalize), reference.route(scores, picked, normalize)
    assert torch.equal(found.pairs, expected.pairs) and torch.equal(found.bounds, expected.bounds)
    torch.testing.assert_close(found.weights, expected.weights)


def test_pairs_are_ordered_in_several_passes(monkeypatch, device, generator):
    monkeypatch.setattr("tessera.kernels.experts._MOST_PAIRS", 32)
    scores = logits(50, 6, torch.float32, device, generator)
    for found, expected in zip(route(scores, 3, True), reference.route(scores, 3, True), strict=True):
        torch.testing.assert_close(found, expected)


def test_of_equal_experts_the_first_are_picked(device):
    """And of scores that are not numbers any, but one that there is: padded rows of a graph hold what they will."""
    scores = torch.zeros((3, 6), device=device)
    scores[1, 4], scores[2] = 1, float("nan")
    for routed in (route, reference.route):
        pairs, bounds, _ = routed(scores[:2], 2, True)
        assert pairs.tolist() == [0, 3, 1, 2] and bounds.tolist() == [0, 2, 3, 3, 3, 4, 4]
    found = route(scores, 2, False)
    assert found.pairs.sort()[0].tolist() == list(range(6)) and found.bounds.tolist()[-1] == 6


def test_of_another_order_of_experts_the_same_is_found(device, generator):
    """transformers' own rule: softmax, top-k, and the sum of the weights."""
    scores = logits(20, 16, torch.float32, device, generator)
    weights, ids = scores.softmax(-1).topk(4, dim=-1)
    found = route(scores, 4, True)
    torch.testing.assert_close(found.weights, weights / weights.sum(-1, keepdim=True))
    expert_of = torch.repeat_interleave(torch.arange(16, device=device), found.bounds.diff())
    assert torch.equal(expert_of[found.pairs.argsort()], ids.flatten())


def plain(weight, half):
    return weight.to(half)


def e4m3(weight, half):
    return Fp8Rows(*quantize_rows(weight))


def int4(weight, half, group=64):
    grouped = weight.unflatten(1, (-1, group))
    scales = (grouped.abs().amax(2) / 7).half().float()
    codes = (grouped / scales[..., None]).round().add(8).clamp(0, 15).flatten(1).to(torch.uint8)
    zeros = torch.full_like(scales, 8)
    zeros[::3] = 7
    return pack(codes, scales, zeros)


FORMS = {"16 bits": plain, "e4m3": e4m3, "4 bits": int4}
#: tokens, experts, picked: experts without a token, one tile, several tiles, all tokens with one expert
CASES = [(1, 8, 2), (20, 5, 2), (70, 3, 1), (9, 2, 2)]


def products(form, half, device, generator, tokens, experts, picked):
    """A routing with many tokens for expert 0, x, and weights of both products."""
    scores = logits(tokens, experts, half, device, generator)
    scores[: tokens // 2, 0] += 10
    x = torch.randn((tokens, K), dtype=half, device=device, generator=generator)
    gates, downs = (
        torch.randn((experts * n, k), device=device, generator=generator) / k**0.5 for n, k in ((2 * K, K), (N, K))
    )
    return reference.route(scores, picked, True), x, FORMS[form](gates, half), FORMS[form](downs, half)


def close(actual, expected):
    step = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.float(), expected.float(), rtol=4 * step, atol=4 * step)


def given(form, x):
    return quantize_rows(x) if form == "e4m3" else x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_grouped_products(half, device, generator, form, case):
    routing, x, gates, downs = products(form, half, device, generator, *case)
    found, expected = (make(given(form, x), gates, routing) for make in (grouped_gate_up, reference.grouped_gate_up))
    assert found.shape == (case[0] * case[2], K) and found.dtype == half
    close(found, expected)
    summed, parts = (make(given(form, expected), downs, routing) for make in (grouped_down, reference.grouped_down))
    assert summed.dtype == half and summed.parts.dtype == parts.parts.dtype and summed.rows == case[0]
    close(summed.product(), parts.product())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "plan", [GroupedPlan(16, 16, 32), GroupedPlan(64, 128, 64), GroupedPlan(32, 32, 128), GroupedPlan(128, 32, 32)]
)
def test_plans_give_the_same(half, device, generator, form, plan):
    routing, x, gates, downs = products(form, half, device, generator, 40, 4, 2)
    expected = reference.grouped_gate_up(given(form, x), gates, routing)
    close(grouped_gate_up(given(form, x), gates, routing, plan), expected)
    found, parts = grouped_down(given(form, expected), downs, routing, plan), reference.grouped_down
    close(found.product(), parts(given(form, expected), downs, routing).product())


@pytest.mark.parametrize(("capability", "large"), [((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_large_tiles_are_a_hopper_gpus(monkeypatch, capability, large):
    """Others lack TMA, or the shared memory."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    x = SimpleNamespace(device=torch.device("cuda"), itemsize=2)
    assert _large(GroupedPlan(128, 256, 64), x, 0) == large
    assert not _large(GroupedPlan(64, 128, 64), x, 0) and not _large(GroupedPlan(128, 256, 64), x, 64)


def test_no_token(half, device, generator):
    routing, x, gates, downs = products("16 bits", half, device, generator, 0, 4, 2)
    for first, second in ((grouped_gate_up, grouped_down), (reference.grouped_gate_up, reference.grouped_down)):
        gated = first(x, gates, routing)
        assert gated.shape == (0, K)
        assert second(gated, downs, routing).product().shape == (0, N)


def test_a_token_does_not_depend_on_the_others(half, device, generator):
    """Its rows are the same alone and among others that are not numbers."""
    _, x, gates, downs = products("16 bits", half, device, generator, 12, 4, 2)
    scores, plan = logits(12, 4, half, device, generator), GroupedPlan(16, 32, 64)

    def run(tokens):
        routing = route(scores[tokens], 2, True)
        return grouped_down(grouped_gate_up(x[tokens], gates, routing, plan), downs, routing, plan).parts

    alone = run(slice(0, 1))
    assert torch.equal(run(slice(0, 12))[:, :1], alone)
    x[1:] = float("nan")
    assert torch.equal(run(slice(0, 12))[:, :1], alone)


@pytest.mark.parametrize("experts", [8, 128])
@pytest.mark.parametrize("shared_memory", [227 << 10, 99 << 10], ids=["Hopper", "Ada"])
def test_plans_fit_any_number_of_tokens(experts, shared_memory):
    for tokens in (1, 2, 10, 64, 256, 1000, 8192):
        for k, size, packed in ((768, 2, False), (2048, 2, False), (2048, 2, True), (1536, 1, False), (4096, 4, False)):
            plan = plan_grouped(tokens * 8, experts, k, size, packed, shared_memory)
            assert k % plan.depth == 0 and plan.depth * size >= 32 and plan.stages >= 2
            depth = (64 * (plan.columns + 4 * plan.rows)) if packed else plan.depth * (plan.rows + plan.columns)
            assert plan.stages * depth * size <= shared_memory, plan


def test_what_the_kernel_cannot_take(half, device, generator):
    routing, x, gates, _ = products("16 bits", half, device, generator, 4, 4, 2)
    with pytest.raises(ValueError, match="one form"):
        grouped_gate_up(quantize_rows(x.float()), gates, routing)
    with pytest.raises(ValueError, match=r"rows of k values .* not \[4, 64\]"):
        grouped_gate_up(x[:, :64].contiguous(), gates, routing)
    with pytest.raises(ValueError, match="contiguous"):
        grouped_gate_up(x.T.contiguous().T, gates, routing)
    with pytest.raises(ValueError, match="k a multiple of 32 bytes"):
        grouped_gate_up(x[:, :24].contiguous(), gates[:, :24].contiguous(), routing)
    with pytest.raises(ValueError, match="not 5"):
        route(torch.zeros((2, 4), device=device), 5, False)
    assert isinstance(routing, Routing)
