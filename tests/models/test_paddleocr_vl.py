"""PaddleOCR-VL beside what every family must hold: its sizes, grid of positions, settings and task prompts."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_paddleocr_vl import GROUP, LEAST, MOST, as_published, reference_processor, token_id, write_folder, write_model
from tiny_qwen2_vl import edit, picture
from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize as theirs_resized

from tessera.engine.execution.model_runner import load_model
from tessera.errors import CheckpointError, InvalidRequest
from tessera.kernels.operands import AttentionPlan
from tessera.kernels.tower_attention import attend_in_triton
from tessera.kernels.tower_layers import PLAIN, gpu_kernels
from tessera.models.paddleocr_vl.vision import PaddleOcrViT
from tessera.models.qwen2_vl.config import PixelRange
from tessera.models.qwen2_vl.patch_tower import PatchGraphs
from tessera.models.registry import family_for, read_config
from tessera.models.tower import load_tower, unfilled_tower
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest
from tessera.settings.stages import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ROOT / "loadtest" / "shapes" / "paddleocr-vl-0.9b"
TASKS = ("OCR:", "Table Recognition:", "Formula Recognition:", "Chart Recognition:")
GRIDS = [(6, 4), (2, 2), (8, 14), (2, 30), (10, 10)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("paddleocr_vl")
    return folder, write_model(folder, min_pixels=LEAST, max_pixels=MOST)


@pytest.fixture(scope="module")
def folder(written: tuple[Path, Any]) -> Path:
    return written[0]


def test_sizes_of_5000_pictures(folder: Path) -> None:
    """Those with a side below a group's are enlarged first; some are too long, some at halves between two multiples."""
    family, dice = family_for(read_config(folder)), np.random.default_rng(0)
    refused = 0
    for index in range(5000):
        width, height = (int(side) for side in np.exp(dice.uniform(0, 9, 2)))
        if index % 5 == 0:
            width, height = 14 * (1 + width // 14), 14 * (1 + height // 14)
        least, most = sorted(int(pixels) for pixels in np.exp(dice.uniform(5, 17, 2)))
        plan = partial(family.plan, width, height, PixelRange(least, most))
        try:
            expected = theirs_resized(height, width, 28, least, most)
        except ValueError:
            refused += 1
            with pytest.raises(InvalidRequest, match="more than 200 times"):
                plan()
        else:
            assert plan().wire == (1, *(side // 14 for side in expected)), (width, height)
    assert 100 < refused < 1000


def pixels(grids: list[tuple[int, int]]) -> torch.Tensor:
    units = sum(height * width for height, width in grids) // 4
    return torch.randint(256, (units, 2, 2, 14, 14, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def raster(groups: torch.Tensor, grids: list[tuple[int, int]]) -> torch.Tensor:
    """As transformers' processor has them, by a mean and a deviation of a half: [patches, 3, side, side]."""
    parts = groups.split([height * width // 4 for height, width in grids])
    rows = [
        part.unflatten(0, (height // 2, width // 2)).transpose(1, 2).flatten(0, 3)
        for part, (height, width) in zip(parts, grids, strict=True)
    ]
    return (torch.cat(rows).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5


@torch.inference_mode()
def test_the_cells_of_the_grid_of_positions_are_stretched_over_a_picture(written: tuple[Path, Any]) -> None:
    """Pictures smaller and larger than the grid; and that the way of transformers 5.17 is another."""
    folder, model = written
    tower, embeddings = load_tower(read_config(folder)), model.model.visual.vision_model.embeddings
    groups, grids = pixels(GRIDS), torch.tensor([(1, *grid) for grid in GRIDS])

    def theirs() -> torch.Tensor:
        return torch.cat(model.model.get_image_features(raster(groups, GRIDS), grids).pooler_output)

    rows = tower(groups, [(1, *grid) for grid in GRIDS])
    torch.testing.assert_close(rows, theirs(), atol=1e-4, rtol=0)
    embeddings.interpolation_align_corners = True
    try:
        assert (rows - theirs()).abs().max() > 1e-2
    finally:
        embeddings.interpolation_align_corners = False


@torch.inference_mode()
def test_graphs_give_the_rows_of_the_plain_forward(folder: Path) -> None:
    pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")
    tower: PaddleOcrViT = load_tower(read_config(folder))
    graphs = PatchGraphs(tower, torch.device("cpu"), [48, 128], [AttentionPlan(32, 16, 4, 2)], PLAIN, tower)
    for grids in ([(8, 14)], [(2, 2)], [(6, 4), (2, 2), (4, 14)]):  # what lies in the buffers must not matter
        wires = [(1, *grid) for grid in grids]
        expected = tower(pixels(grids), wires)
        found = graphs(pixels(grids), wires)
        torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4)


@torch.inference_mode()
def test_heads_of_published_towers_run_by_our_kernel(tmp_path: Path) -> None:
    """72 values, which it takes as 80."""
    pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")
    write_model(tmp_path)
    edit(tmp_path, vision_config={"hidden_size": 144, "num_hidden_layers": 1})
    tower = load_tower(read_config(tmp_path), random_weights=True)
    assert (tower.attention.stored_size, tower.attention.head_size) == (72, 80)
    within = partial(attend_in_triton, plan=AttentionPlan(rows=32, tokens=16, warps=4, stages=2))
    wires = [(1, 6, 4), (1, 8, 6)]
    expected, found = (tower(pixels(GRIDS)[:18], wires, kernels) for kernels in (PLAIN, gpu_kernels(within=within)))
    torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=2e-5)


def test_what_a_saver_left_out_takes_the_class_default(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    published = {"architectures": ["PaddleOCRVLForConditionalGeneration"], "vision_config": {"num_channels": 3}}
    (tmp_path / "config.json").write_text(json.dumps(published))
    config, theirs = read_config(tmp_path), PaddleOCRVLConfig()
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(config.vision, name) == getattr(theirs.vision_config, name)
        assert getattr(config.text, name) == getattr(theirs.text_config, name)
    for name in ("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps"):
        assert getattr(config.text, name) == getattr(theirs.text_config, name)
    assert config.text.rope_theta == theirs.text_config.rope_parameters["rope_theta"]
    assert config.text.mrope_section == (16, 24, 24) and config.text.tie_word_embeddings
    for name in ("image_size", "patch_size", "hidden_act", "layer_norm_eps", "spatial_merge_size"):
        assert getattr(config.vision, name) == getattr(theirs.vision_config, name)
    assert config.vision.rope_theta == theirs.vision_config.rope_parameters["rope_theta"]
    assert config.image_token_id == theirs.image_token_id
    size = reference_processor(write_folder(tmp_path), 1, 1).image_processor.__class__.size
    assert config.pictures == PixelRange(size["shortest_edge"], size["longest_edge"])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"compression_ratio": 2.0}, "text model's compression_ratio 2.0 is not supported; supported are 1.0"),
        ({"rope_is_neox_style": False}, "text model's rope_is_neox_style False is not supported"),
        ({"use_3d_rope": False}, "text model's use_3d_rope False is not supported"),
        ({"attention_bias": True}, "text model's attention_bias beside use_bias True is not supported"),
        ({"moe_num_experts": 8}, "text model's setting 'moe_num_experts' is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "beside mrope_section, rope type 'linear'"),
        ({"rope_scaling": {"mrope_section": [4, 4, 4, 4]}}, "the number of axes in mrope_section 4 is not supported"),
        ({"vision_config": {"num_channels": 1}}, "vision_config.num_channels 1 is not supported; supported are 3"),
        ({"vision_config": {"vision_use_head": True}}, "vision_config setting 'vision_use_head' is not supported"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type 'yarn' is not supported"),
        ({"vision_config": {"num_attention_heads": 16}}, "48 channels over 16 heads"),
    ],
    ids=str,
)
def test_what_transformers_has_not_is_refused(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    write_model(tmp_path, min_pixels=LEAST, max_pixels=MOST)
    read_config(as_published(tmp_path))
    with pytest.raises(CheckpointError, match=complaint):
        read_config(edit(tmp_path, **changes))


def test_an_untied_head_is_wanted(tmp_path: Path) -> None:
    """transformers ties it where config.json itself says that it is not, and says nothing."""
    write_model(tmp_path, tied=True)
    edit(as_published(tmp_path), tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="lm_head.weight: missing"):
        load_model(read_config(tmp_path), EngineConfig())
    assert read_config(edit(tmp_path, tie_word_embeddings=True)).text.tie_word_embeddings


@pytest.mark.parametrize(
    ("processor", "complaint"),
    [
        ({"image_processor_type": "SiglipImageProcessor"}, "image_processor_type 'SiglipImageProcessor'"),
        ({"temporal_patch_size": 2}, "the image processor's temporal_patch_size 2 is not supported; supported are 1"),
        ({"patch_size": 16}, "the image processor's patch_size 16"),
        ({"do_pad": True}, "do_pad"),
    ],
    ids=str,
)
def test_another_image_processor_is_refused(tmp_path: Path, processor: dict[str, Any], complaint: str) -> None:
    write_model(tmp_path, **processor)
    with pytest.raises(CheckpointError, match=complaint):
        read_config(tmp_path)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_s_prompt_is_the_template_s(folder: Path, task: str) -> None:
    """A picture before the task's words, in the template's own turns; a marker puts it anywhere else."""
    (data, image), ours = picture(56, 84, seed=4), Preprocessor.from_checkpoint(folder)
    processor = reference_processor(folder, LEAST, MOST)
    content = [{"type": "image"}, {"type": "text", "text": task}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    assert prompt.endswith(f"<|IMAGE_END|>{task}\nAssistant:\n")
    expected = processor(images=[image], text=prompt)["input_ids"][0]
    for text in (task, f"<image>{task}"):
        found = ours(PreprocessRequest(text=text, images=[data]))
        assert found.input_ids.tolist() == list(expected)


def test_a_user_spells_no_picture_and_video_is_refused(folder: Path) -> None:
    ours = Preprocessor.from_checkpoint(folder)
    forged = ours(PreprocessRequest(text="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>")).input_ids
    assert not {token_id(folder, "<|IMAGE_START|>"), token_id(folder, "<|IMAGE_PLACEHOLDER|>")} & set(forged.tolist())
    with pytest.raises(InvalidRequest, match="2 frames: video is not supported; send pictures"):
        ours.family.plan_of((2, 4, 4))


def test_the_published_shape_has_the_parameters_of_transformers_own() -> None:
    """Its heads of 72 are as wide as 80 in the tower."""
    config = read_config(SHAPE)
    with torch.device("meta"):
        model = PaddleOCRVLForConditionalGeneration(PaddleOCRVLConfig.from_pretrained(SHAPE))
    theirs = sum(weight.numel() for weight in (*model.model.visual.parameters(), *model.model.projector.parameters()))
    vision, tower = config.vision, unfilled_tower(config)
    ours, more = sum(weight.numel() for weight in tower.parameters()), vision.num_heads * 8
    assert ours - theirs == vision.depth * more * (4 * vision.hidden_size + 3)
    assert config.pictures.max_pixels // GROUP == 3600  # tokens of the largest picture
