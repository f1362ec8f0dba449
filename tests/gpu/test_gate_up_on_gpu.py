"""The gate-up product that ends in the activation, at InternVL3-8B's shape, in bfloat16 on a GPU (`make test-gpu`)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tessera.engine.execution import memory_budget
from tessera.kernels.tuning import MeasuredChoices, graph_milliseconds, layer_kernels
from tessera.linear.scheme import Linear, LinearShape
from tessera.linear.tuning import choose
from tessera.linear.unquantized import Unquantized

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU with TMA"
)

HIDDEN, SIZE, STEP = 3584, 18944, 8192


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(4)
    return torch.randn(2 * SIZE, HIDDEN, device="cuda", generator=generator).mul_(HIDDEN**-0.5).bfloat16()


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, device="cuda", generator=torch.Generator("cuda").manual_seed(count)).bfloat16()


@torch.inference_mode()
@pytest.mark.parametrize("count", [STEP, 2528, 1])
def test_in_a_graph_it_errs_no_more_than_the_library(weight, count):
    kernels, x = layer_kernels("cuda"), rows(count)
    kernels.gate_up_silu(-x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.gate_up_silu(x, weight)
    graph.replay()
    gate, up = F.linear(x.float(), weight.float()).chunk(2, dim=1)
    exact = F.silu(gate).mul_(up)
    found = {"fused": out, "library": kernels.silu_and_multiply(F.linear(x, weight))}
    errors = {name: float((result.float() - exact).norm() / exact.norm()) for name, result in found.items()}
    print(f"{count} rows: {errors}")
    assert errors["fused"] < 1.02 * errors["library"] < 0.01


@torch.inference_mode()
def test_measuring_it_takes_less_than_the_memory_kept_back(tmp_path):
    layers = [
        Linear(HIDDEN, {"w": slice(0, 2 * SIZE)}, False, lambda _: Unquantized(), torch.bfloat16, torch.device("cuda"))
        for _ in range(3)
    ]
    for layer in layers:
        layer.randomize(torch.Generator("cuda").manual_seed(4))
    choices = MeasuredChoices(tmp_path / "choices.json", graph_milliseconds)
    shape = LinearShape(2 * SIZE, HIDDEN, False, "gate_up", torch.bfloat16, most_rows=STEP)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    choose(layers, shape, choices, "here")
    taken = torch.cuda.max_memory_reserved() - before
    print(f"{taken / 2**30:.2f} GiB; {layers[0].scheme.ways}: {choices._known}")
    assert taken < memory_budget._RESERVE_BYTES
