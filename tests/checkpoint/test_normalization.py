"""What an HF-native image processor says about grey levels: applied as transformers does, or refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_checkpoints import Shape, as_internvl_chat, hf_native
from transformers import InternVLForConditionalGeneration
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tessera.checkpoint.normalization import IMAGENET_MEAN, IMAGENET_STD
from tessera.errors import CheckpointError
from tessera.models.registry import family_for, read_config
from tessera.models.tower import load_tower

STATED: list[dict[str, Any]] = [
    {},
    {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.25, 0.125]},
    {"image_mean": [0.1, 0.2, 0.3], "do_rescale": False, "rescale_factor": 7},
    {"do_normalize": False, "image_mean": [9.0, 9.0, 9.0]},
    {"do_normalize": False, "do_rescale": False},
    {"rescale_factor": 1 / 127.5, "image_mean": [1.0, 1.0, 1.0], "image_std": [1.0, 1.0, 1.0]},
    # transformers' InternVLProcessor cuts tiles whatever this says; the published checkpoints say false.
    {"crop_to_patches": False},
]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_native(tmp_path_factory.mktemp("tiny"), Shape(text="llama"))


def stating(folder: Path, **stated: Any) -> dict[str, Any]:
    """The folder's image processor with other values; what a test before stated is gone."""
    path = folder / "processor_config.json"
    whole = json.loads(path.read_text())
    whole["image_processor"] = BASE | stated
    path.write_text(json.dumps(whole))
    return whole["image_processor"]


BASE = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "image_mean": list(IMAGENET_MEAN),
    "image_std": list(IMAGENET_STD),
    "resample": 3,
    "size": {"height": 448, "width": 448},
}


@pytest.mark.parametrize("stated", STATED, ids=json.dumps)
def test_the_tower_sees_what_transformers_processor_gives(native: Path, stated: dict[str, Any]) -> None:
    settings = stating(native, **stated)
    pixels = np.random.default_rng(0).integers(0, 256, (448, 448, 3), dtype=np.uint8)
    processor = GotOcr2ImageProcessorPil(**settings)
    values = processor(images=[Image.fromarray(pixels)], return_tensors="pt", crop_to_patches=True)["pixel_values"]
    model = InternVLForConditionalGeneration.from_pretrained(native, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model.model.get_image_features(values.float()).pooler_output
        found = load_tower(read_config(native))(torch.from_numpy(pixels)[None])
    # Grey levels far outside of what the tower was made for: compare relative to the rows' own size.
    assert (found - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


def test_one_number_stands_for_all_channels_and_null_for_the_default(native: Path) -> None:
    stating(native, image_mean=0.5, image_std=None, do_center_crop=None, do_pad=False, rescale_factor=None)
    vision = read_config(native).vision
    assert vision.pixel_mean == pytest.approx((0.5, 0.5, 0.5))
    assert vision.pixel_std == pytest.approx(IMAGENET_STD)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"do_resize": False}, "do_resize False"),
        ({"do_convert_rgb": False}, "do_convert_rgb False"),
        ({"do_center_crop": True}, "do_center_crop True"),
        ({"do_pad": True}, "do_pad True"),
        ({"do_flip_channel_order": True}, "do_flip_channel_order True"),
        ({"do_normalize": "no"}, "do_normalize 'no'"),
        ({"image_mean": [0.5, 0.5]}, "image_mean must be a number, or one for each"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std must be a positive number"),
        ({"image_std": "imagenet"}, "image_std"),
        ({"rescale_factor": 0}, "rescale_factor must be a positive number"),
        ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
        ({"size": {"height": 384, "width": 384}}, "size"),
        ({"resample": 2}, "resample 2"),
        ({"max_patches": 0}, "max_patches"),
        ({"min_patches": 13}, "min_patches"),
    ],
    ids=json.dumps,
)
def test_what_would_change_pixels_otherwise_is_refused_by_name(
    native: Path, stated: dict[str, Any], words: str
) -> None:
    stating(native, **stated)
    with pytest.raises(CheckpointError, match=words):
        family_for(read_config(native))


def test_the_original_layouts_code_has_its_own_values(native: Path, tmp_path: Path) -> None:
    """Its preprocessor_config.json is of a processor that its code never uses."""
    stating(native)
    chat = as_internvl_chat(native, tmp_path)
    clip = {"image_processor_type": "CLIPFeatureExtractor", "do_center_crop": True, "image_mean": [0.5, 0.5, 0.5]}
    (chat / "preprocessor_config.json").write_text(json.dumps(clip))
    vision = read_config(chat).vision
    assert (vision.pixel_mean, vision.pixel_std) == (IMAGENET_MEAN, IMAGENET_STD)
