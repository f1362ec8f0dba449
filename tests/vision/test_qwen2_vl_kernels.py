"""Qwen2-VL's tower with the kernels of a GPU: the same rows, in FP8 as well; what is measured, by kind of batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiny_qwen2_vl_tower import config_of, groups, picture, wires

from tessera.kernels.attention_plan import AttentionPlan
from tessera.kernels.fp8_rows import Fp8Rows
from tessera.kernels.tower_attention import attend_in_triton
from tessera.kernels.tower_layers import Fp8Linear, gpu_kernels
from tessera.kernels.tuning import MeasuredChoices
from tessera.models.qwen2_vl.vision import Qwen2ViT
from tessera.models.tower import load_tower
from tessera.settings.stages import VisionSettings
from tessera.vision import torch_runner
from tessera.vision.fp8_tower import put
from tessera.vision.torch_runner import TorchRunner

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GRIDS = [(6, 4), (2, 2), (8, 6)]
WITHIN = partial(attend_in_triton, plan=AttentionPlan(rows=32, tokens=16, warps=4, stages=2))


@pytest.fixture
def tower(tmp_path) -> Qwen2ViT:
    return load_tower(config_of(tmp_path), random_weights=True).to(DEVICE)


def pixels() -> torch.Tensor:
    return torch.cat([groups(picture(grid, seed)) for seed, grid in enumerate(GRIDS)]).to(DEVICE)


def test_a_tower_of_faster_kernels_gives_the_same_rows(tower):
    with torch.inference_mode():
        expected = tower(pixels(), wires(GRIDS))
        actual = tower(pixels(), wires(GRIDS), gpu_kernels(within=WITHIN))
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4)


def test_in_fp8_what_comes_before_a_linear_layer_quantizes_its_rows(tower, monkeypatch):
    if DEVICE.type == "cpu":  # where the interpreter's cast to e4m3 loses carries
        monkeypatch.setattr("tessera.kernels.fp8_rows.ROWS_DTYPE", torch.float32)
    quantized = {name: Fp8Linear.of(each, torch.bfloat16, DEVICE) for name, each in tower.fp8_linears().items()}
    if DEVICE.type == "cpu":
        for linear in quantized.values():
            linear.dtype = torch.float32
    else:
        tower.to(torch.bfloat16)
    put(tower, quantized)
    given: dict[str, bool] = {}
    forward = Fp8Linear.forward

    def seen(self, x):
        given[names[self]] = isinstance(x, Fp8Rows)
        return forward(self, x)

    names = {linear: name for name, linear in quantized.items()}
    monkeypatch.setattr(Fp8Linear, "forward", seen)
    with torch.inference_mode():
        expected = tower(pixels(), wires(GRIDS))
        assert not any(given.values())
        actual = tower(pixels(), wires(GRIDS), gpu_kernels(within=WITHIN, fp8=True))
    assert {name.split(".", 2)[-1] for name, rows in given.items() if not rows and "layers" in name} == {
        "attention.output"  # whose rows are of all heads, each of which is computed by itself
    }
    cosines = torch.nn.functional.cosine_similarity(actual.double(), expected.double(), dim=-1)
    assert cosines.mean() > 0.995


class Scripted(MeasuredChoices):
    """Calls nothing; says the last way, and what was asked."""

    def __init__(self, path, clock=None):
        super().__init__(path, clock)
        self.asked: dict[str, list[str]] = {}

    def fastest(self, question, ways):
        self.asked[question] = list(ways)
        return list(ways)[-1] if "mixed" in question else "default"


def test_attention_is_chosen_for_pictures_of_one_size_and_for_others(tower, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some card")
    monkeypatch.setattr("tessera.models.qwen2_vl.vision.Qwen2ViT.forward", lambda *_, **__: None)
    choices = Scripted(tmp_path / "choices.json")
    forward = tower.bfloat16().tuned(60, choices)  # too little for a graph
    kernels = forward.keywords["kernels"]
    equal, mixed = choices.asked
    for question in (equal, mixed):
        for named in ("240 patches", "2 heads of 80", "torch.bfloat16", "some card"):
            assert named in question
    assert {"cudnn", "flash"} <= set(choices.asked[equal]) and "cudnn" not in choices.asked[mixed]
    built = []
    monkeypatch.setattr("tessera.kernels.tower_attention.query_tiles", lambda *_: built.append(_) or [])
    monkeypatch.setattr("tessera.kernels.tower_attention.to_device", lambda values, device: values)
    kernels.attend_within([16, 16], DEVICE)
    assert not built
    kernels.attend_within([16, 20], DEVICE)
    assert len(built) == 1


def test_a_runner_of_graphs_has_its_kernels_measured_where_there_are_none(tmp_path, monkeypatch):
    config, asked = config_of(tmp_path), []
    tower = load_tower(config, random_weights=True)
    monkeypatch.setattr(torch_runner, "serving_tower", lambda *_: tower)
    monkeypatch.setattr(tower, "tuned", lambda cost, choices: asked.append(cost) or (lambda given, wires: given))
    settings = VisionSettings("graph", infer_batch_size=2, dtype="bfloat16", device="cuda")
    runner = TorchRunner.from_checkpoint(config, settings)
    assert asked == [2 * 484] and torch.equal(runner.run(torch.ones(3)), torch.ones(3))
    plain = TorchRunner.from_checkpoint(config, VisionSettings("torch", dtype="bfloat16", device="cuda"))
    assert plain._forward is tower and len(asked) == 1
