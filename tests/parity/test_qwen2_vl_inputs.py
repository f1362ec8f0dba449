"""What Qwen2-VL's language model is given, against transformers: sizes, patches, token ids, positions, logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_qwen2_vl import (
    GROUP,
    LEAST,
    MOST,
    StillProcessor,
    model_config,
    picture,
    reference_processor,
    write_folder,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as theirs_resized
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from tessera.errors import InvalidRequest
from tessera.models.qwen2_vl.config import PixelRange
from tessera.models.qwen2_vl.processor import smart_resize
from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("inputs"), min_pixels=LEAST, max_pixels=MOST)


@pytest.fixture(scope="module")
def ours(folder: Path) -> Preprocessor:
    return Preprocessor.from_checkpoint(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> StillProcessor:
    return reference_processor(folder, LEAST, MOST)


def test_smart_resize_of_5000_sizes() -> None:
    """Some of them too long, some at the halves between two multiples; all bounds from one group to a large page."""
    dice = np.random.default_rng(0)
    refused = 0
    for index in range(5000):
        width, height = (int(side) for side in np.exp(dice.uniform(0, 9, 2)))
        if index % 5 == 0:
            width, height = 14 * (1 + width // 14), 14 * (1 + height // 14)
        least, most = sorted(int(pixels) for pixels in np.exp(dice.uniform(5, 17, 2)))
        try:
            expected = theirs_resized(height, width, 28, least, most)
        except ValueError:
            refused += 1
            with pytest.raises(InvalidRequest, match="more than 200 times"):
                smart_resize(width, height, 28, PixelRange(least, most))
        else:
            assert smart_resize(width, height, 28, PixelRange(least, most)) == expected[::-1], (width, height)
    assert 100 < refused < 1000


def reference(
    processor: StillProcessor, messages: list[dict[str, Any]], images: list[Image.Image]
) -> tuple[list[int], np.ndarray, torch.Tensor]:
    """Token ids, grey levels [groups, 2, 2, 14, 14, 3] of the frames, which must be alike, and image_grid_thw."""
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    output = processor(images=images or None, text=prompt, return_tensors="pt")
    ids = output["input_ids"][0].tolist()
    if not images:
        return ids, np.empty((0, 2, 2, 14, 14, 3)), torch.empty((0, 3), dtype=torch.long)
    frames = output["pixel_values"].view(-1, 2, 2, 3, 2, 14, 14).permute(4, 0, 1, 2, 5, 6, 3)
    assert torch.equal(frames[0], frames[1])
    mean, std = (
        torch.tensor(value) for value in (processor.image_processor.image_mean, processor.image_processor.image_std)
    )
    return ids, ((frames[0] * std + mean) * 255).numpy(), output["image_grid_thw"]


def check(found: Prepared, ids: list[int], grey: np.ndarray, grids: torch.Tensor, most: float) -> None:
    assert found.input_ids.tolist() == ids
    assert found.plan.reshape(-1, 4)[:, 1:].tolist() == grids.tolist()
    difference = np.abs(found.pixels.reshape(grey.shape) - grey)
    assert difference.sum() <= 0.1 * difference.size and difference.max(initial=0) <= most


@pytest.mark.parametrize("size", [(28, 112), (140, 196), (196, 84), (112, 112)])
def test_patches_of_pictures_that_keep_their_size(
    ours: Preprocessor, theirs: StillProcessor, size: tuple[int, int]
) -> None:
    data, image = picture(*size, seed=1)
    expected = reference(
        theirs, [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}], [image]
    )
    check(ours(PreprocessRequest(text="?", images=[data])), *expected, most=1e-3)


def test_patches_of_random_sizes(ours: Preprocessor, theirs: StillProcessor) -> None:
    """Enlarged, kept and shrunk, within InternVL's bound: 0.1 grey level in the mean, 3 at most."""
    dice = np.random.default_rng(2)
    for seed in range(60):
        data, image = picture(*np.exp(dice.uniform(2.3, 5.8, 2)).astype(int).tolist(), seed)
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
        expected = reference(theirs, messages, [image])
        check(ours(PreprocessRequest(text="What is it?", images=[data])), *expected, most=3.01)


@pytest.mark.parametrize(("least", "most"), [(4, 6), (30, 40), (100, 100)])
def test_bounds_of_a_request_as_the_processor_s_own(folder: Path, ours: Preprocessor, least: int, most: int) -> None:
    data, image = picture(150, 210, seed=3)
    bounds = {"min_pixels": least * GROUP, "max_pixels": most * GROUP}
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    expected = reference(reference_processor(folder, **bounds), messages, [image])
    check(ours(PreprocessRequest(text="?", images=[data], **bounds)), *expected, most=3.01)


def test_pictures_between_texts_over_several_turns(ours: Preprocessor, theirs: StillProcessor) -> None:
    pairs = [picture(60, 90, seed=4), picture(140, 50, seed=5), picture(33, 33, seed=6)]
    text = {"type": "text", "text": " and\n"}
    messages = [
        {"role": "system", "content": "You inspect homes.\n"},
        {"role": "user", "content": [{"type": "text", "text": "Compare "}, {"type": "image"}, text, {"type": "image"}]},
        {"role": "assistant", "content": "A socket, <|box_start|>(1,2)<|box_end|> "},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Now? 中文 café"}]},
    ]
    expected = reference(theirs, messages, [image for _, image in pairs])
    check(ours(PreprocessRequest(messages=messages, images=[data for data, _ in pairs])), *expected, most=3.01)


@pytest.mark.parametrize("text", ["Hello", " A  b\n\nc ", "\nText Recognition:", "café 中文 🙂 1234"])
def test_text_alone(ours: Preprocessor, theirs: StillProcessor, text: str) -> None:
    check(ours(PreprocessRequest(text=text)), *reference(theirs, [{"role": "user", "content": text}], []), most=0)


def test_positions_of_2000_random_prompts(ours: Preprocessor) -> None:
    """Of up to four pictures with text before, between and behind, and what the answer's first position adds."""
    with torch.device("meta"):
        model = Qwen2VLModel(model_config())
    dice, family = np.random.default_rng(7), ours.family
    for _ in range(2000):
        plans = [family.plan_of((1, *(2 * dice.integers(1, 9, 2)).tolist())) for _ in range(dice.integers(0, 5))]
        kinds, spans = [0] * int(dice.integers(1, 9)), []
        for plan in plans:
            spans.append((len(kinds), plan.tokens))
            kinds += [1] * plan.tokens + [0] * int(dice.integers(1, 9))
        found = family.positions(len(kinds), np.array(spans, np.int32).reshape(-1, 2), plans)
        grids = torch.tensor([plan.wire for plan in plans], dtype=torch.long).reshape(-1, 3)
        types = torch.tensor([kinds])
        expected, deltas = model.get_rope_index(torch.zeros_like(types), types, image_grid_thw=grids)
        assert found.dtype == np.int32 and np.array_equal(found, expected[:, 0].numpy())
        assert found.max() + 1 - len(kinds) == deltas.item()  # what a Sequence adds to the length
