"""Pictures of any sizes on a GPU: every way of attention there, and towers of the Qwens with what was measured."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_qwen2_vl import QWEN2_5_VL, QWEN2_VL
from vision.tiny_qwen2_vl_tower import config_of, groups, model_of, picture, save, wires

from tessera.checkpoint.config import CheckpointConfig
from tessera.kernels.graphs import GraphPool
from tessera.kernels.operands import query_tiles
from tessera.kernels.tower_attention import (
    attend_in_triton,
    attend_within,
    attention_by,
    fixed_plan,
    leaving_room,
    triton_configs,
)
from tessera.kernels.tower_layers import gpu_kernels, varlen_backends
from tessera.models.tower import load_tower
from tessera.settings.stages import VisionSettings
from tessera.vision.runner import make_runner
from tessera.vision.torch_runner import TorchRunner

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIXES = {
    "equal": [1024] * 3,
    "large": [5476],
    "mixed": [4, 1000, 4, 64, 333, 130, 2500],
    "windows": [64] * 81 + [16] * 18 + [4],  # of a picture of 74 x 74 patches
}
GRIDS = [(40, 40), (2, 2), (18, 26), (38, 22), (2, 30)]
LEAST_COSINE = {"checkpoint": 0.999, "fp8": 0.99}


def qkv_of(patches: int, heads: int, size: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(patches, 3, heads, size, device=DEVICE, dtype=torch.bfloat16) * 2


@pytest.mark.parametrize("size", [64, 80])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", varlen_backends(DEVICE, True))
def test_every_way_of_attention(name, mix, size):
    query, key, value = qkv_of(sum(MIXES[mix]), 3, size).unbind(1)
    expected = attend_within(MIXES[mix], DEVICE)(query.float(), key.float(), value.float())
    attend = varlen_backends(DEVICE, True)[name](MIXES[mix], DEVICE)
    for _ in range(3):  # a race need not show the first time
        actual = attend(query, key, value)
        assert actual.shape == expected.shape and actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.float(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("plan", triton_configs(DEVICE).values(), ids=repr)
def test_room_for_others_changes_no_bit(plan):
    lengths = [5476, 300, 1000]
    qkv = qkv_of(sum(lengths), 16, 80).unbind(1)
    found = []
    for room in (False, True):
        with leaving_room(room):
            found.append(attend_in_triton(lengths, DEVICE, plan)(*qkv))
    assert torch.equal(*found)


@pytest.mark.parametrize("plan", triton_configs(DEVICE).values(), ids=repr)
def test_our_kernels_in_a_graph_of_more_tiles(plan):
    """Tiles that fill up a recorded launch do nothing, and a neighbour's not-a-numbers stay there."""
    lengths = [600, 200, 300]
    qkv = qkv_of(sum(lengths), 3, 80)
    expected = attend_within(lengths, DEVICE)(*qkv.float().unbind(1))
    qkv[600:800] = float("nan")
    cut = torch.from_numpy(query_tiles(lengths, plan.rows)).to(DEVICE)
    tiles = torch.cat((cut, torch.zeros(5, 3, dtype=torch.int32, device=DEVICE)))
    attention = attention_by(plan)
    attention(*qkv.unbind(1), tiles, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = attention(*qkv.unbind(1), tiles, plan)
    graph.replay()
    own = [*range(600), *range(800, 1100)]
    torch.testing.assert_close(rows[own].float(), expected[own], rtol=2**-6, atol=2**-6)
    assert rows[600:800].isnan().all()


@pytest.fixture(scope="module", params=[QWEN2_VL, QWEN2_5_VL], ids=str)
def config(request, tmp_path_factory: pytest.TempPathFactory) -> CheckpointConfig:
    folder = tmp_path_factory.mktemp("tiny")
    save(model_of(kind=request.param), folder)
    return config_of(folder, request.param)


def pixels() -> torch.Tensor:
    return torch.cat([groups(picture(grid, seed)) for seed, grid in enumerate(GRIDS)])


@pytest.fixture(scope="module", params=LEAST_COSINE)
def runner(config, request) -> TorchRunner:
    if request.param == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with FP8")
    settings = VisionSettings("graph", 2, dtype="bfloat16", device="cuda", quantization=request.param)
    return make_runner(config, settings)


def test_the_rows_are_those_of_the_cpu(config, runner, request):
    plain = TorchRunner.from_checkpoint(config, VisionSettings("torch", threads=4))
    expected = plain.run(pixels(), wires(GRIDS)).double()
    rows = runner.run(pixels(), wires(GRIDS))
    assert rows.is_cuda and rows.dtype == torch.bfloat16
    cosines = torch.nn.functional.cosine_similarity(rows.double().cpu(), expected, dim=-1)
    assert cosines.mean() >= LEAST_COSINE[request.node.callspec.params["runner"]]
    start = 0
    for seed, grid in enumerate(GRIDS):  # alone as beside others
        alone = runner.run(groups(picture(grid, seed)), wires([grid])).double()
        beside = rows[start : start + len(alone)].double()
        start += len(alone)
        assert torch.nn.functional.cosine_similarity(alone, beside, dim=-1).mean() >= 0.998


@torch.inference_mode()
def test_graphs_of_large_forwards(config, monkeypatch):
    """One after the other in one memory: rows of the forward that is launched, the same bits in a twin, and kept."""
    tower = load_tower(config, torch.bfloat16, random_weights=True).cuda()
    plans = [fixed_plan(DEVICE)] * len(tower.reaches)
    forward = tower._with_graphs(15_488, attend_within, plans, plans, math.inf)
    ran, kept, replay = [], [], GraphPool.replay
    monkeypatch.setattr(GraphPool, "replay", lambda pool, size: ran.append(size) or replay(pool, size))
    for grids in ([(74, 74)], [(74, 74), *GRIDS], [(74, 74)] * 2 + GRIDS, GRIDS, [(74, 74)] * 3):
        given = torch.cat([groups(picture(grid, seed)) for seed, grid in enumerate(grids)]).cuda()
        for room in (False, True):
            with leaving_room(room):
                rows = forward(given, wires(grids))
            kept.append((rows, rows.clone(), tower(given, wires(grids), gpu_kernels())))
    assert ran == [5632] * 2 + [8704] * 2 + [14336] * 2 + [3072] * 2  # and the last is launched
    for (rows, copy, launched), (twin, _, _) in zip(kept[::2], kept[1::2]):
        assert torch.equal(rows, copy) and torch.equal(rows, twin)
        assert torch.nn.functional.cosine_similarity(rows.double(), launched.double(), dim=-1).min() >= 0.99


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="for Hopper")
def test_a_picture_has_its_bits_in_every_graph(config):
    """Of a deterministic server: in small and large graphs, in their twins, and where a forward is launched."""
    runner = make_runner(config, VisionSettings("graph", 8, dtype="bfloat16", device="cuda", deterministic=True))
    first, *others = GRIDS
    alone = runner.run(groups(picture(first)), wires([first]))
    for company in (others, [(74, 74)], [(74, 74)] * 2, [(74, 74)] * 3):
        given = torch.cat([groups(picture(grid)) for grid in (first, *company)])
        for room in (False, True):
            with leaving_room(room):
                assert torch.equal(runner.run(given, wires([first, *company]))[: len(alone)], alone)


def test_some_groups_of_pictures_alone(config, runner, request):
    """By a graph and beyond the largest: windows of few groups are more than a graph has room for."""
    plain = TorchRunner.from_checkpoint(config, VisionSettings("torch", threads=4))
    for grid in ((38, 22), (60, 60), (120, 100)):
        mask = torch.rand(grid[0] * grid[1] // 4, generator=torch.Generator().manual_seed(1)) < 0.3
        given = groups(picture(grid))[mask], [(1, *grid, np.packbits(mask.numpy()).tobytes())]
        found, expected = runner.run(*given).double().cpu(), plain.run(*given).double()
        cosines = torch.nn.functional.cosine_similarity(found, expected, dim=-1)
        assert cosines.mean() >= LEAST_COSINE[request.node.callspec.params["runner"]]


def test_a_forward_allocates_no_more_than_it_said(runner):
    given = pixels().cuda()
    runner.run(given, wires(GRIDS))  # cuBLAS's workspace, which stays
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runner.run(given, wires(GRIDS))
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    assert 0 < used <= runner.activation_bytes(len(given)) + (8 << 20)
