"""The preprocessor against transformers' own InternVL processor: tile counts, grey levels, token ids."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tiny_checkpoints
import torch
from architecture import load_processor
from PIL import Image

from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest

CHECKPOINT = Path(__file__).parents[2] / "build" / "default_model" / "checkpoint"
SIZES = [(448, 448), (480, 320), (640, 480), (1280, 720), (600, 800), (333, 1000), (1000, 97), (31, 17), (461, 449)]


@pytest.fixture(scope="module")
def ours() -> Preprocessor:
    return Preprocessor.from_checkpoint(CHECKPOINT)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return load_processor(CHECKPOINT)


def picture(width: int, height: int, seed: int) -> tuple[bytes, Image.Image]:
    """Colour fields with noise, as JPEG bytes, and what Pillow makes of them."""
    dice = np.random.default_rng(seed)
    coarse = dice.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), dtype=np.uint8)
    smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(int)
    noisy = np.clip(smooth + dice.normal(0, 8, smooth.shape), 0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noisy).save(stream, "JPEG", quality=90)
    return stream.getvalue(), Image.open(stream).convert("RGB")


def reference(theirs: Any, messages: list[dict[str, Any]], images: list[Image.Image]) -> tuple[np.ndarray, list[int]]:
    """Grey levels float [tiles, 448, 448, 3] before normalisation, and token ids."""
    prompt = theirs.apply_chat_template(messages, add_generation_prompt=True)
    output = theirs(images=images or None, text=prompt, return_tensors="pt")
    ids = output["input_ids"][0].tolist()
    if not images:
        return np.empty((0, 448, 448, 3)), ids
    processor = theirs.image_processor
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (processor.image_mean, processor.image_std))
    grey = (output["pixel_values"] * std + mean) * 255
    return grey.permute(0, 2, 3, 1).numpy(), ids


def check(found: Prepared, grey: np.ndarray, ids: list[int]) -> None:
    assert found.input_ids.tolist() == ids
    tiles = found.pixels.reshape(-1, 448, 448, 3)
    assert tiles.shape == grey.shape
    if len(tiles):
        difference = np.abs(tiles - grey)
        assert difference.mean() <= 0.1
        assert difference.max() <= 3.01  # theirs went through float and back


@pytest.mark.parametrize("size", SIZES)
def test_one_picture(ours: Preprocessor, theirs: Any, size: tuple[int, int]) -> None:
    data, image = picture(*size, seed=1)
    content = [{"type": "image"}, {"type": "text", "text": "Is there a smoke detector?"}]
    expected = reference(theirs, [{"role": "user", "content": content}], [image])
    check(ours(PreprocessRequest(text="Is there a smoke detector?", images=[data])), *expected)


def test_two_pictures_over_two_turns(ours: Preprocessor, theirs: Any) -> None:
    pairs = [picture(300, 200, seed=2), picture(200, 500, seed=3)]
    messages = [
        {"role": "system", "content": "You inspect homes."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?\n"}]},
        {"role": "assistant", "content": "A socket."},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image"}]},
    ]
    expected = reference(theirs, messages, [image for _, image in pairs])
    check(ours(PreprocessRequest(messages=messages, images=[data for data, _ in pairs])), *expected)


@pytest.mark.parametrize("text", ["Hello", " A  b\n\nc ", "café 中文 🙂 1234"])
def test_text_alone(ours: Preprocessor, theirs: Any, text: str) -> None:
    check(ours(PreprocessRequest(text=text)), *reference(theirs, [{"role": "user", "content": text}], []))


@pytest.mark.parametrize("most", [1, 2, 6])
def test_fewer_tiles(ours: Preprocessor, theirs: Any, most: int) -> None:
    data, image = picture(700, 500, seed=4)
    found = ours(PreprocessRequest(text="x", images=[data], tile_policy={"max_tiles": most}))
    counted = theirs.image_processor([image], crop_to_patches=True, max_patches=most)["num_patches"]
    assert found.plan.reshape(-1, 4)[:, 1].tolist() == list(counted)


def test_the_original_layout_with_internlm2_files(tmp_path: Path) -> None:
    """Same plan and pixels as the HF-native twin; its own template, its sentencepiece tokenizer, <s> in front."""
    native = tiny_checkpoints.hf_native(tmp_path / "native", tiny_checkpoints.Shape(text="llama", max_position=4096))
    chat = tiny_checkpoints.as_internvl_chat(native, tmp_path / "chat")
    data, _ = picture(640, 480, seed=5)
    request = PreprocessRequest(text="What is this?", images=[data])
    twin, found = (Preprocessor.from_checkpoint(folder) for folder in (native, chat))
    first, second = twin(request), found(request)
    assert np.array_equal(first.pixels, second.pixels)
    assert np.array_equal(first.plan, second.plan)
    assert not np.array_equal(first.digest, second.digest)
    tokenizer = found.prompts.tokenizer
    text = tokenizer.decode(second.input_ids, skip_special_tokens=False)
    rows = "<IMG_CONTEXT>" * int(second.spans[0, 1])
    assert second.input_ids[0] == tokenizer.bos_id
    system = "<|im_start|>system\nYou inspect homes.<|im_end|>"
    expected = f"{system}<|im_start|>user\n<img>{rows}</img>\nWhat is this?<|im_end|><|im_start|>assistant\n"
    assert text.replace(" ", "") == "<s>" + expected.replace(" ", "")
