"""Qwen3-VL's tower: rows from within, filled heads, graphs, memory; against transformers."""

from pathlib import Path

import numpy as np
import pytest
import tiny_qwen3_vl
import torch
from models.conformance import check_memory
from safetensors.torch import save_file
from tiny_qwen2_vl import edit, picture
from tiny_qwen2_vl_tower import groups, wires
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from tessera.checkpoint.config import CheckpointConfig
from tessera.kernels.operands import AttentionPlan
from tessera.kernels.tower_layers import PLAIN, Fp8Linear
from tessera.kernels.tuning import MeasuredChoices
from tessera.models.qwen3_vl.vision import Qwen3ViT
from tessera.models.registry import read_config
from tessera.models.tower import load_tower, stored_in_fp8
from tessera.settings.stages import VisionSettings
from tessera.vision.fp8_tower import serving_tower

GRIDS = [(2, 2), (2, 30), (6, 6), (14, 10), (40, 4)]
SIDE = 6  # of the grid of positions


def config_of(folder: Path, text: int = 64, **vision: object) -> CheckpointConfig:
    edit(tiny_qwen3_vl.write_folder(folder), vision_config={**vision, "out_hidden_size": text})
    return read_config(edit(folder, text_config={"hidden_size": text}))


@pytest.fixture(scope="module")
def model() -> Qwen3VLVisionModel:
    model = Qwen3VLVisionModel(Qwen3VLVisionConfig(**tiny_qwen3_vl.VISION)).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
    return model


@pytest.fixture(scope="module")
def tower(model: Qwen3VLVisionModel, tmp_path_factory: pytest.TempPathFactory) -> Qwen3ViT:
    folder = tmp_path_factory.mktemp("tiny")
    stored = {f"model.visual.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(stored, folder / "model.safetensors")
    return load_tower(config_of(folder))


def test_weights_stored_in_fp8_fill_the_heads_too(model: Qwen3VLVisionModel, tmp_path: Path) -> None:
    """All of them, the mergers' included: the tower runs in it."""
    stored, exact = {}, {}
    for name, tensor in model.state_dict().items():
        name = f"model.visual.{name}"
        stored[name] = exact[name] = tensor.contiguous()
        if name.endswith("weight") and ("linear_fc" in name or ".attn." in name):
            scale = tensor.abs().amax(1, keepdim=True) / 448
            stored[name], stored[f"{name}_scale"] = (tensor / scale).to(torch.float8_e4m3fn), scale
            exact[name] = stored[name].float() * scale
    config = config_of(tmp_path)
    save_file(exact, tmp_path / "model.safetensors")
    expected = load_tower(config).state_dict()
    save_file(stored, tmp_path / "model.safetensors")
    found = load_tower(config)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())
    assert stored_in_fp8(config) == set(found.fp8_linears())
    served = serving_tower(config, VisionSettings("torch"))
    assert all(isinstance(served.get_submodule(name), Fp8Linear) for name in found.fp8_linears())


def pixels(grids: list[tuple[int, int]]) -> torch.Tensor:
    pictures = [np.asarray(picture(16 * across, 16 * down, seed)[1]) for seed, (down, across) in enumerate(grids)]
    return torch.cat([groups(each, 16) for each in pictures])


@torch.inference_mode()
def test_pictures_of_any_shape_beside_others(model: Qwen3VLVisionModel, tower: Qwen3ViT) -> None:
    given = pixels(GRIDS)
    values = (given.float() / 255 - 0.5) / 0.5
    patches = values.flatten(0, 2).permute(0, 3, 1, 2).unsqueeze(2).expand(-1, -1, 2, -1, -1).reshape(-1, 2 * 3 * 16**2)
    expected = model(patches, grid_thw=torch.tensor(wires(GRIDS)))
    rows = torch.cat((expected.pooler_output, *expected.deepstack_features), dim=1)
    torch.testing.assert_close(tower(given, wires(GRIDS)), rows, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_graphs_give_the_rows_of_the_plain_forward(tower: Qwen3ViT) -> None:
    pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")
    from tessera.models.qwen2_vl.patch_tower import PatchGraphs

    plan = AttentionPlan(rows=32, tokens=16, warps=4, stages=2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tower = tower.to(device)
    graphs = PatchGraphs(tower, device, [48, 128], [plan], PLAIN, tower)
    # What the one before left in the buffers must not matter.
    for which in ([(8, 14)], [(2, 2)], [(6, 8)], [(6, 4), (2, 2), (8, 6)], [(8, 16)]):
        given = pixels(which).to(device)
        expected = tower(given, wires(which))
        close = 2e-5 * float(expected.abs().max())
        torch.testing.assert_close(graphs(given, wires(which)), expected, atol=close, rtol=1e-4)
    tower.to("cpu")


def test_filled_heads_are_measured_and_the_activation_is_an_epilogue(
    tower: Qwen3ViT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some card")
    monkeypatch.setattr(Qwen3ViT, "forward", lambda *_, **__: None)

    class Scripted(MeasuredChoices):
        def fastest(self, question: str, ways: object, margin: float = 0.0) -> str:
            asked.append(question)
            return "default"

    config = config_of(tmp_path)
    forward = load_tower(config, torch.bfloat16, random_weights=True).tuned(
        60, Scripted(tmp_path / "choices.json", None)
    )
    assert all("2 heads of 32" in question for question in asked) and asked
    assert forward.keywords["kernels"].epilogue


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes",
    [
        # as an eighth of the published tower: heads of 72
        dict(hidden_size=144, intermediate_size=538, num_position_embeddings=48**2, text=512),
        dict(hidden_size=32, intermediate_size=32, text=640),  # whose rows are the most there is
    ],
    ids=["as published", "of wide rows"],
)
@pytest.mark.parametrize("grids", [[(40, 40)], [(10, 10)] * 8 + [(40, 20)]], ids=["one picture", "nine"])
def test_activations_are_in_proportion_to_the_patches(
    tmp_path: Path, sizes: dict[str, int], dtype: str, grids: list[tuple[int, int]]
) -> None:
    config = config_of(tmp_path, deepstack_visual_indexes=[0, 1, 2], **sizes)
    given = torch.zeros(400, 2, 2, 16, 16, 3, dtype=torch.uint8)
    check_memory(config, dtype, given, wires(grids), 1.6, random_weights=True)
