"""Small forwards of Qwen2-VL's tower by static buffers: the plain forward's rows; on the CPU a replay computes."""

from __future__ import annotations

import pytest
import torch
from tiny_qwen2_vl_tower import config_of, groups, picture, wires

from tessera.kernels.attention_plan import AttentionPlan
from tessera.kernels.tower_layers import PLAIN
from tessera.models.tower import load_tower

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.models.qwen2_vl.vision import PatchGraphs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAN = AttentionPlan(rows=32, tokens=16, warps=4, stages=2)


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    return load_tower(config_of(tmp_path_factory.mktemp("tiny")), random_weights=True).to(DEVICE)


@pytest.fixture
def asked() -> list[int]:
    """Patches of the forwards that no graph took."""
    return []


@pytest.fixture
def graphs(tower, asked) -> PatchGraphs:
    def otherwise(pixels, wires):
        asked.append(4 * len(pixels))
        return tower(pixels, wires)

    with torch.inference_mode():
        return PatchGraphs(tower, DEVICE, [48, 128], PLAN, PLAIN, otherwise)


def pixels(grids) -> torch.Tensor:
    return torch.cat([groups(picture(grid, seed)) for seed, grid in enumerate(grids)]).to(DEVICE)


@pytest.mark.parametrize(
    ("grids", "otherwise"),
    [
        ([(2, 2)], []),  # far smaller than its graph
        ([(6, 8)], []),  # as large as its graph
        ([(6, 4), (2, 2), (8, 6)], []),
        ([(8, 16)], []),
        ([(2, 2)] * 32, []),
        ([(10, 14)], [140]),  # larger than the largest graph
        ([(2, 2)] * 65, [260]),
    ],
    ids=str,
)
@torch.inference_mode()
def test_the_rows_are_those_of_the_plain_forward(tower, graphs, asked, grids, otherwise):
    graphs(pixels([(8, 14)]) // 2, wires([(8, 14)]))  # what lies in the buffers must not matter
    actual = graphs(pixels(grids), wires(grids))
    expected = tower(pixels(grids), wires(grids))
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4)
    assert asked == otherwise


@torch.inference_mode()
def test_rows_are_the_callers_to_keep(graphs):
    first = graphs(pixels([(6, 8)]), wires([(6, 8)]))
    kept = first.clone()
    graphs(255 - pixels([(6, 8)]), wires([(6, 8)]))
    assert torch.equal(first, kept)
