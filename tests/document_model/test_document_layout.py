"""What pages tell the document model of their blocks: targets of patches and rows, and where answers look."""

from __future__ import annotations

import numpy as np
import torch
from document_batches import chunk
from document_network import (
    embedded,
    image_rows,
    looks,
    patch_states,
    text_states,
)
from document_samples import Sample, layout_sample, thousandths
from document_tokens import ChatTokens
from evaluate_documents import page_samples
from transformers import Qwen2VLForConditionalGeneration

import pages

TOKENS = ChatTokens()


def test_targets_of_a_layout_are_where_blocks_begin_end_and_cover() -> None:
    page = pages.sample(1)
    sample = layout_sample(page, TOKENS)
    grid = np.zeros((74, 74, 3), int)
    grid[sample.places[:, 0], sample.places[:, 1]] = sample.dense
    height, width = page.picture.shape
    for number, block in enumerate(page.blocks, 1):
        left, top, right, bottom = np.array(block.box) / (width, height, width, height) * 74
        assert grid[int((top + bottom) / 2), int((left + right) / 2), 0] == number
        assert grid[int(top), int(left), 1] and grid[int(bottom), int(right), 2]
        kind, *box = sample.blocks[number].tolist()
        assert pages.KINDS[kind - 1] == block.kind and tuple(box) == thousandths(block.box, page)
    assert grid[..., 1].sum() <= len(page.blocks) and grid[0, 0, 0] == 0 and not sample.blocks[0].any()


def test_each_token_of_a_layout_s_answer_is_said_of_the_block_of_its_line() -> None:
    """What separates two lines already of the one to come; of what ends the answer, none."""
    sample = layout_sample(pages.sample(1), TOKENS)
    held = chunk([sample, layout_sample(pages.sample(2), TOKENS)], TOKENS).arrays
    line, width = held["line"][0], held["ids"].shape[1]
    said = {place: number for place, number in enumerate(line.tolist()) if number}
    asked = held["asked"][held["asked"] < width].tolist()
    assert list(said) == asked[:-1] and len(asked) == len(sample.answer)
    texts = TOKENS.decode(sample.answer).split("\n")
    for number in range(1, len(sample.blocks)):
        spelt = TOKENS.decode([sample.answer[asked.index(place)] for place, n in said.items() if n == number])
        assert spelt == "\n" * (number > 1) + texts[number - 1]


def test_crops_and_layouts_are_generated_side_by_side() -> None:
    crop, layout = next(s for s in page_samples(0) if s.step == "text"), layout_sample(pages.sample(0), TOKENS)
    held = chunk([crop, layout], TOKENS, answers=False).arrays
    assert list(held["lengths"]) == [len(crop.patches), len(layout.patches)]


@torch.inference_mode()
def test_a_place_looks_at_what_its_layer_s_first_head_attends_to(
    model: Qwen2VLForConditionalGeneration, samples: list[Sample]
) -> None:
    """transformers' own attention weights."""
    sample = samples[3]
    held = {name: torch.from_numpy(array) for name, array in chunk([sample], TOKENS).arrays.items()}
    x = embedded(
        model,
        held["ids"],
        image_rows(model, patch_states(model, held["patches"], held["places"], None)),
        held["source"],
        held["to"],
    )
    entering: list[torch.Tensor] = []
    text_states(model, x, held["positions"], entering=entering)
    body = model.model.language_model
    body.config._attn_implementation = "eager"
    theirs = body(inputs_embeds=x, position_ids=held["positions"], output_attentions=True).attentions
    for layer in (0, 2, 3):
        found = looks(model, layer, entering[layer], held["positions"], 20).exp()
        torch.testing.assert_close(found[0], theirs[layer][0, 0, 20:], atol=1e-4, rtol=0)
