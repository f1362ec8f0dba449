"""The vision tower and projector against transformers, fp32, and the original layout against its HF-native twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_checkpoints import Shape, as_internvl_chat, hf_native
from transformers import InternVLForConditionalGeneration

from tessera.models.registry import read_config
from tessera.models.tower import load_tower
from tessera.settings.stages import VisionSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.pictures import VisionItem

TOLERANCE = 1e-4
SHAPES = {
    "layer_norm": Shape(text="llama"),
    "rms_norm": Shape(text="llama", norm_type="rms_norm"),
    "rms_norm, q/k norm": Shape(text="llama", norm_type="rms_norm", qk_norm=True, vision_layers=3),
    "as the 6B: an odd number of heads": Shape(
        text="llama", norm_type="rms_norm", qk_norm=True, attention_bias=False, vision_hidden=80, vision_heads=5
    ),
    "layer_norm, q/k norm, no bias": Shape(text="llama", qk_norm=True, attention_bias=False),
    "an earlier layer": Shape(text="llama", feature_layer=-2),
    "qwen2 body, patches of 28": Shape(text="qwen2", patch_size=28, tie=True),
}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES.keys())
def native(request, tmp_path_factory):
    return hf_native(tmp_path_factory.mktemp("tiny") / "native", request.param)


def tiles(count=2):
    """Noise, and a smooth picture."""
    noise = np.random.default_rng(0).integers(0, 256, (count, 448, 448, 3), dtype=np.uint8)
    ramp = np.linspace(0, 255, 448, dtype=np.uint8)
    noise[0, ..., 0], noise[0, ..., 1] = ramp, ramp[:, None]
    return noise


@torch.inference_mode()
def reference(folder, pixels):
    """transformers' own rows for uint8 tiles, normalised as its processor does."""
    model = InternVLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    mean, std = (torch.tensor(values) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    values = ((torch.from_numpy(pixels).float() / 255 - mean) / std).permute(0, 3, 1, 2)
    return model.model.get_image_features(
        values, vision_feature_layer=model.config.vision_feature_layer, vision_feature_select_strategy="default"
    ).pooler_output


def encoded(folder, pixels, runner):
    plan = np.array([0, len(pixels), 1, len(pixels)], np.int32)
    item = VisionItem(pixels.ravel(), plan, np.array([1, 2], np.int64))
    (rows,) = VisionEncoder.from_checkpoint(folder, VisionSettings(runner=runner)).encode([item])
    return rows.view(len(pixels), -1, rows.shape[-1])


def test_rows_are_those_of_transformers(native):
    pixels = tiles()
    expected = reference(native, pixels)
    for runner in ("torch", "onnx"):
        assert (encoded(native, pixels, runner) - expected).abs().max() <= TOLERANCE


def test_the_original_layout_gives_the_same_rows(native, tmp_path):
    config = read_config(native)
    text = "internlm2" if config.text.architecture == "LlamaForCausalLM" else "qwen2"
    chat = as_internvl_chat(native, tmp_path, text=text)
    pixels = torch.from_numpy(tiles())
    with torch.inference_mode():
        ours, theirs = load_tower(config)(pixels), load_tower(read_config(chat))(pixels)
    assert (ours - theirs).abs().max() <= 1e-6


def test_a_final_norm_after_the_last_layer(tmp_path):
    folder = hf_native(tmp_path, Shape(mean_pooling=False))
    pixels = tiles(1)
    assert (encoded(folder, pixels, "onnx") - reference(folder, pixels)).abs().max() <= TOLERANCE


def test_names_of_older_transformers_hold_the_same_model(tmp_path):
    new, old = hf_native(tmp_path / "new"), hf_native(tmp_path / "old", prefix="model.")
    pixels = tiles(1)
    rows = encoded(old, pixels, "onnx")
    assert torch.equal(rows, encoded(new, pixels, "onnx"))
    assert (rows - reference(old, pixels)).abs().max() <= TOLERANCE
