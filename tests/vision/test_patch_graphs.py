"""Forwards of Qwen2-VL's tower by static buffers: the plain forward's rows; on the CPU a replay computes. And
what is measured, by kind of batch."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_qwen2_vl import QWEN2_5_VL, QWEN2_VL
from tiny_qwen2_vl_tower import config_of, groups, picture, wires

from tessera.kernels.graphs import GraphPool
from tessera.kernels.operands import AttentionPlan
from tessera.kernels.tower_attention import attend_in_triton, attend_within, leaving_room
from tessera.kernels.tower_layers import PLAIN
from tessera.kernels.tuning import MeasuredChoices, kernels_version
from tessera.models.tower import load_tower
from tessera.settings.stages import VisionSettings
from tessera.vision import torch_runner
from tessera.vision.torch_runner import TorchRunner

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.models.qwen2_vl.patch_tower import PatchGraphs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAN = AttentionPlan(rows=32, tokens=16, warps=4, stages=2)


@pytest.fixture(scope="module", params=[QWEN2_VL, QWEN2_5_VL], ids=str)
def tower(request, tmp_path_factory):
    return load_tower(config_of(tmp_path_factory.mktemp("tiny"), request.param), random_weights=True).to(DEVICE)


@pytest.fixture(scope="module")
def recorded(tower) -> tuple[PatchGraphs, list[int]]:
    """The graphs, their buffers used before, and the patches of each forward that none of them took."""
    asked: list[int] = []

    def otherwise(pixels, wires):
        asked.append(4 * len(pixels))
        return tower(pixels, wires)

    with torch.inference_mode():
        graphs = PatchGraphs(tower, DEVICE, [48, 128], [PLAN] * len(tower.reaches), PLAIN, otherwise)
        graphs(pixels([(8, 14)]), wires([(8, 14)]))
    return graphs, asked


@pytest.fixture
def asked(recorded) -> list[int]:
    recorded[1].clear()
    return recorded[1]


@pytest.fixture
def graphs(recorded) -> PatchGraphs:
    return recorded[0]


def pixels(grids) -> torch.Tensor:
    return torch.cat([groups(picture(grid, seed)) for seed, grid in enumerate(grids)]).to(DEVICE)


@pytest.mark.parametrize(
    ("grids", "otherwise"),
    [
        ([(2, 2)], []),  # far smaller than its graph
        ([(6, 8)], []),  # as large as its graph
        ([(6, 4), (2, 2), (8, 6)], []),
        ([(8, 16)], []),
        ([(10, 12)], []),  # windows of four sizes
        ([(10, 2)] * 6, []),  # for so few patches the most windows, of 16 and 4
        ([(2, 2)] * 32, []),
        ([(10, 14)], [140]),  # larger than the largest graph
        ([(2, 2)] * 65, [260]),
    ],
    ids=str,
)
@torch.inference_mode()
def test_the_rows_are_those_of_the_plain_forward(tower, graphs, asked, grids, otherwise):
    actual = graphs(pixels(grids), wires(grids))
    expected = tower(pixels(grids), wires(grids))
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4)
    assert asked == otherwise


@torch.inference_mode()
def test_there_is_room_for_the_windows_of_a_strip(tower, monkeypatch):
    """Of 16 patches each, 9 of them, where the pictures alone take no more than 7 tiles."""
    monkeypatch.setattr("tessera.models.qwen2_vl.patch_tower._PICTURES", 2)
    graphs = PatchGraphs(tower, DEVICE, [128], [PLAN] * len(tower.reaches), PLAIN, lambda *_: None)
    given = pixels([(2, 62), (2, 2)]), wires([(2, 62), (2, 2)])
    expected = tower(*given)
    torch.testing.assert_close(graphs(*given), expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4)


@torch.inference_mode()
def test_pictures_of_which_some_groups_are_left_out(tower, graphs, monkeypatch):
    """Alone among what is kept; more windows of few groups than there is room for go elsewhere."""
    dice, kept, told = np.random.default_rng(0), [], []
    for height, width in ((18, 20), (2, 8), (10, 12)):
        mask = dice.random(height * width // 4) < 0.2
        kept.append(mask)
        told.append((1, height, width, np.packbits(mask).tobytes()))
    given = pixels([each[1:3] for each in told])[torch.from_numpy(np.concatenate(kept))], told
    expected = tower(*given)
    torch.testing.assert_close(graphs(*given), expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4)
    monkeypatch.setattr("tessera.models.qwen2_vl.patch_tower._PICTURES", 2)
    narrow = PatchGraphs(tower, DEVICE, [128], [PLAN] * len(tower.reaches), PLAIN, lambda *_: None)
    every_fourth = [(1, 2, 96, np.packbits(np.arange(48) % 4 == 0).tobytes())]
    assert (narrow(pixels([(2, 24)]), every_fourth) is None) is (len(tower.reaches) > 1)


@pytest.mark.parametrize(
    ("bytes_of", "grids", "room", "by"),
    [
        (128, [(6, 8)], False, ("vision graphs", 48)),
        (128, [(6, 8)], True, ("vision graphs", 48)),
        (128, [(6, 4), (8, 8)], False, ("vision graphs", 96)),
        (128, [(6, 4), (8, 8)], True, ("vision graphs with room", 96)),
        (128, [(8, 16)], True, ("vision graphs with room", 128)),
        (128, [(10, 14)], True, None),  # which would take more memory
        (256, [(10, 14)], True, ("vision graphs with room", 160)),
        (256, [(10, 18)], False, None),  # more than the setting's
    ],
)
@torch.inference_mode()
def test_large_forwards_are_graphs_too_and_have_twins_that_leave_room(tower, monkeypatch, bytes_of, grids, room, by):
    ran, pools, record = [], [], GraphPool.record

    def replay(pool, size):
        ran.append((pool._what, size))
        return pool._run(size)

    monkeypatch.setattr("tessera.models.qwen2_vl.vision.SIZES", (48,))
    monkeypatch.setattr("tessera.models.qwen2_vl.vision.LARGE_SIZES", (96, 128, 160, 256))
    monkeypatch.setattr("tessera.models.qwen2_vl.vision.gpu_kernels", lambda **_: PLAIN)
    monkeypatch.setattr("tessera.models.qwen2_vl.patch_tower.with_room", lambda plan: replace(plan, warps=8))
    monkeypatch.setattr(GraphPool, "replay", replay)
    # On a CPU recording computes each size, and keeps nothing.
    recording = record if DEVICE.type == "cuda" else lambda *_: None
    monkeypatch.setattr(GraphPool, "record", lambda pool, prepare: pools.append(pool) or recording(pool, prepare))
    plans, bytes_at_most = [PLAN] * len(tower.reaches), tower.activation_bytes(bytes_of // 4)
    forward = tower._with_graphs(160, attend_within, plans, plans, bytes_at_most)
    with leaving_room(room):
        actual = forward(pixels(grids), wires(grids))
    expected = tower(pixels(grids), wires(grids))
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4)
    assert ran == [by] * bool(by)
    assert len(pools) == 3 and (DEVICE.type == "cpu" or len({pool._memory for pool in pools}) == 1)
    # Where ours is not the fastest within every reach there are none.
    tower._with_graphs(160, attend_within, plans, plans[1:], bytes_at_most)
    assert [pool.sizes for pool in pools[3:]] == [[48]]


@torch.inference_mode()
def test_rows_are_the_callers_to_keep(graphs):
    first = graphs(pixels([(6, 8)]), wires([(6, 8)]))
    kept = first.clone()
    graphs(255 - pixels([(6, 8)]), wires([(6, 8)]))
    assert torch.equal(first, kept)


class Scripted(MeasuredChoices):
    """Calls nothing; says the last way, of equal pictures torch's, and what was asked."""

    def __init__(self, path, clock=None):
        super().__init__(path, clock)
        self.asked: dict[str, list[str]] = {}

    def fastest(self, question, ways):
        self.asked[question] = list(ways)
        return "default" if "equal pictures" in question else list(ways)[-1]


def test_attention_is_chosen_for_pictures_of_one_size_and_for_others(tower, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some card")
    monkeypatch.setattr("tessera.models.qwen2_vl.vision.Qwen2ViT.forward", lambda *_, **__: None)
    choices = Scripted(tmp_path / "choices.json")
    forward = deepcopy(tower).bfloat16().tuned(60, choices)  # too little for a graph
    kernels = forward.keywords["kernels"]
    kinds = [(kind, reach.name) for reach in reversed(tower.reaches) for kind in ("equal", "mixed")]
    for (question, ways), (kind, name) in zip(choices.asked.items(), kinds, strict=True):
        told = f"within {kind} {name}", "2 heads of 80", "torch.bfloat16", "some card", f"kernels {kernels_version()}"
        for named in told:
            assert named in question
        assert ("cudnn" in ways) is ("flash" in ways) is (kind == "equal")
    built = []
    monkeypatch.setattr("tessera.kernels.tower_attention.query_tiles", lambda *_: built.append(_) or [])
    monkeypatch.setattr("tessera.kernels.tower_attention.to_device", lambda values, device: values)
    for lengths, ours in (([16, 16], len(tower.reaches) > 1), ([400] * 2, False), ([16, 20], True), ([4, 8000], True)):
        built.clear()
        kernels.attend_within(lengths, DEVICE)
        assert bool(built) is ours, lengths


def test_without_measurements_pictures_of_any_sizes_have_one_attention(tower, monkeypatch):
    monkeypatch.setattr("tessera.models.qwen2_vl.vision.Qwen2ViT.forward", lambda *_, **__: None)
    kernels = deepcopy(tower).bfloat16().tuned(60, None).keywords["kernels"]
    assert kernels.attend_within.func is attend_in_triton and not kernels.epilogue


def test_a_runner_of_graphs_has_its_kernels_measured_where_there_are_none(tmp_path, monkeypatch):
    config, asked = config_of(tmp_path), []
    tower = load_tower(config, random_weights=True)
    monkeypatch.setattr(torch_runner, "serving_tower", lambda *_: tower)
    monkeypatch.setattr(
        tower, "tuned", lambda cost, _, graphs: asked.append((cost, graphs)) or (lambda given, _: given)
    )
    cache, share = 1 << 20, tower.weight_bytes + tower.activation_bytes(2 * 484) + (1 << 20) + 1000
    settings = VisionSettings("graph", 2, dtype="bfloat16", device="cuda", memory_bytes=share, cache_bytes=cache)
    runner = TorchRunner.from_checkpoint(config, settings)
    assert asked == [(2 * 484, 500)] and torch.equal(runner.run(torch.ones(3)), torch.ones(3))
    plain = TorchRunner.from_checkpoint(config, VisionSettings("torch", dtype="bfloat16", device="cuda"))
    assert plain._forward is tower and len(asked) == 1
