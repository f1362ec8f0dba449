"""The suite of ``conformance.py`` for the families of this package."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tiny_checkpoints
import tiny_qwen2_vl
import torch
from grid_oracle import random_sizes
from models.conformance import (
    Case,
    check_memory,
    check_plans,
    check_quantized,
    check_strict_weights,
    check_whole_chain,
    logprobs,
)
from tiny_checkpoints import Shape, hf_native
from tiny_qwen2_vl import GROUP, LEAST, MOST
from vision.tiny_qwen2_vl_tower import PATCH, config_of

from tessera.models.qwen2_vl.config import PixelRange
from tessera.models.registry import read_config
from tessera.models.tile_policy import THUMBNAIL_RULES, TilePolicy
from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest
from tessera.settings.stages import EngineConfig

DEFAULT = Path(__file__).resolve().parents[2] / "build" / "default_model" / "checkpoint"
# The picture's prompt is longer than Phi-3's trained 32 tokens; heads of 24 are no power of two, as the published 96.
LONGROPE = (
    ("rope_type", "longrope"),
    ("rope_theta", 10000.0),
    ("original_max_position_embeddings", 32),
    ("short_factor", [1.0 + 0.05 * i for i in range(12)]),
    ("long_factor", [1.2 + 0.5 * i for i in range(12)]),
)
DYNAMIC = (("rope_type", "dynamic"), ("rope_theta", 10000.0), ("factor", 2.0))
SHAPES = {
    "qwen2": Shape(rope=DYNAMIC),
    "llama": Shape(text="llama"),
    "qwen3": Shape(text="qwen3", head_dim=32),
    "qwen3, tied": Shape(text="qwen3", head_dim=8, tie=True),
    "phi3": Shape(text="phi3", text_hidden=96, head_dim=24, text_kv_heads=4, rope=LONGROPE),
}


def jpeg() -> bytes:
    noise = np.random.default_rng(3).integers(0, 255, (12, 16, 3), np.uint8)
    picture = cv2.resize(noise, (640, 480), interpolation=cv2.INTER_CUBIC)
    return cv2.imencode(".jpg", picture)[1].tobytes()


TILES = PreprocessRequest(text="What is this?", images=[jpeg()], tile_policy={"max_tiles": 2})
PICTURES = [tiny_qwen2_vl.picture(56, 84, seed=4), tiny_qwen2_vl.picture(140, 56, seed=5)]
PATCHES = PreprocessRequest(text="<image> and <image>: alike?", images=[data for data, _ in PICTURES])


def write_internvl(folder: Path, shape: Shape | None = None) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(hf_native(folder, shape or Shape()), dtype=torch.float32).eval()


def write_qwen2_vl(folder: Path, tied: bool = False, flat: bool = False) -> Any:
    model = tiny_qwen2_vl.write_model(folder, tied=tied, min_pixels=LEAST, max_pixels=MOST)
    if flat:
        tiny_qwen2_vl.flatten(folder)
    return model


def tiles(folder: Path, prepared: Prepared) -> dict[str, torch.Tensor]:
    values = torch.from_numpy(prepared.pixels.reshape(-1, 448, 448, 3).copy()).permute(0, 3, 1, 2).float() / 255
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
    return {"pixel_values": (values - mean) / std}


def patches(folder: Path, prepared: Prepared) -> dict[str, torch.Tensor]:
    """By transformers' own processor, of pictures that keep their size."""
    processor = tiny_qwen2_vl.reference_processor(folder, LEAST, MOST)
    return processor.image_processor([image for _, image in PICTURES], return_tensors="pt")


CASES = {
    **{f"internvl, {name}": Case(partial(write_internvl, shape=shape), TILES, tiles) for name, shape in SHAPES.items()},
    **{
        f"qwen2_vl, {'tied' if tied else 'untied'}, {'flat' if flat else 'nested'}": Case(
            partial(write_qwen2_vl, tied=tied, flat=flat),
            PATCHES,
            patches,
            kinds=True,
            engine=EngineConfig(block_size=4, max_sequences=4, max_batched_tokens=16),  # prefill in parts
        )
        for tied in (False, True)
        for flat in (False, True)
    },
}
FAMILIES = {"internvl": write_internvl, "qwen2_vl": write_qwen2_vl}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    FAMILIES[request.param](folder)
    return folder


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_and_log_probabilities_are_those_of_transformers(tmp_path: Path, case: Case) -> None:
    check_whole_chain(case, tmp_path)


@pytest.mark.parametrize(("text", "body"), [("internlm2", "llama"), *((body, body) for body in SHAPES)])
def test_the_original_layout_gives_its_native_twins_logits(tmp_path: Path, text: str, body: str) -> None:
    native = hf_native(tmp_path / "native", SHAPES[body])
    chat = tiny_checkpoints.as_internvl_chat(native, tmp_path / "chat", text=text.removesuffix(", tied"))
    prepared = Preprocessor.from_checkpoint(chat)(TILES)  # its own template and tokenizer; the twin gets the same ids
    for ours, twin in zip(logprobs(chat, prepared), logprobs(native, prepared), strict=True):
        assert [token for token, _ in ours] == [token for token, _ in twin]
        assert [value for _, value in ours] == pytest.approx([value for _, value in twin], abs=1e-3)


def test_a_plan_is_known_by_its_wire_form(folder: Path) -> None:
    if read_config(folder).model_type == "internvl":
        check_plans(folder, random_sizes(300), [TilePolicy(thumbnail=rule) for rule in THUMBNAIL_RULES])
    else:
        sizes = [size for size in random_sizes(300) if max(size) <= 200 * min(size)]
        check_plans(folder, sizes, [PixelRange(LEAST, MOST), PixelRange(GROUP, 4000 * GROUP)])


def test_missing_and_left_over_vision_weights_are_named(folder: Path) -> None:
    check_strict_weights(folder)


@pytest.mark.parametrize(("quantization", "kind"), [("checkpoint", "float32"), ("fp8", "fp8")])
def test_the_stage_says_what_it_serves(folder: Path, quantization: str, kind: str) -> None:
    check_quantized(folder, quantization, kind)


@pytest.mark.parametrize(
    ("which", "dtype"),
    [("tiny", "float32"), ("default", "float32"), ("as the 6B", "float32"), ("as the 6B", "bfloat16")],
)
def test_activations_are_estimated_from_above(tmp_path: Path, which: str, dtype: str) -> None:
    # Five heads of 128, four inner rows for one outer as there; patches enough that they are the most there is.
    sizes = dict(vision_hidden=640, vision_heads=5, vision_mlp=2560, vision_layers=1, patch_size=14)
    shape = Shape(norm_type="rms_norm", qk_norm=True, **sizes) if which == "as the 6B" else Shape()
    config = read_config(DEFAULT if which == "default" else hf_native(tmp_path, shape))
    side = config.vision.image_size
    check_memory(config, dtype, torch.zeros(2, side, side, 3, dtype=torch.uint8), (), 3, random_weights=False)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ({}, "float32"),
        ({}, "bfloat16"),
        (dict(embed_dim=32), "float32"),
        (dict(embed_dim=320, num_heads=4), "bfloat16"),
    ],
)
@pytest.mark.parametrize("grids", [[(40, 40)], [(10, 10)] * 8 + [(40, 20)]], ids=["one picture", "nine"])
def test_activations_are_in_proportion_to_the_patches(
    tmp_path: Path, sizes: dict[str, int], dtype: str, grids: list[tuple[int, int]]
) -> None:
    pixels, wires = torch.zeros(400, 2, 2, PATCH, PATCH, 3, dtype=torch.uint8), [(1, *grid) for grid in grids]
    check_memory(config_of(tmp_path, mlp_ratio=4, **sizes), dtype, pixels, wires, 1.5, random_weights=True)
