"""What pages tell the document model of their blocks: targets of patches and rows, and where answers look."""

from __future__ import annotations

import document_samples
import numpy as np
import pytest
import torch
from document_batches import chunk
from document_network import (
    BOX_WEIGHT,
    ROW_WEIGHT,
    DenseHead,
    embedded,
    image_rows,
    looking_loss,
    looks,
    patch_states,
    text_states,
)
from document_samples import Sample, layout_sample, thousandths
from document_tokens import ChatTokens
from evaluate_documents import page_samples
from torch import nn
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


def test_the_loss_of_blocks_is_how_far_off_the_head_says_they_are() -> None:
    """A head that says nothing has every patch's own middle as both boxes, every row's at the page's corner, and takes
    all kinds and digits for equally likely."""
    sample = layout_sample(pages.sample(1), TOKENS)
    made = chunk([sample], TOKENS)
    head, count = DenseHead(8, 6, TOKENS.size, len(pages.KINDS)), len(sample.patches)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    held = {name: torch.from_numpy(array) for name, array in made.arrays.items()}
    found = head.layout_loss(torch.zeros(1, count, 8), torch.zeros(1, count // 4, 6), held)
    middles = np.tile((sample.places[:, ::-1] + 0.5) / 74, 2)
    sides, covering = sample.blocks[:, 1:] / 1000, sample.dense[:, 0]
    near = far = named = spelt = 0.0
    for number in range(1, len(sides)):
        around = np.abs(middles[covering == number][:, None] - sides[max(1, number - 1) : number + 1]).sum()
        near += around
    upper_lower = covering.reshape(-1, 2, 2).max(-1).ravel()
    for number in upper_lower:
        named += 1 + (number > 0)
        boxes = sides[max(1, number - 1) : number + 1] if number else sides[:0]
        spelt += len(boxes)
        far += boxes.sum()
    corners = np.log(2) * (2 * count + 9 * sample.dense[:, 1:].sum())
    kinds = np.log(len(pages.KINDS) + 1)
    rows = kinds * named + np.log(10) * spelt + BOX_WEIGHT * far
    assert found.item() == pytest.approx(kinds * count + corners + BOX_WEIGHT * near + ROW_WEIGHT / 2 * rows, rel=1e-4)


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


@torch.inference_mode()
def test_looking_at_all_places_alike_costs_the_share_of_the_block_s_rows(
    model: Qwen2VLForConditionalGeneration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_samples, "LAYOUT_SIDE", 280)
    sample = layout_sample(pages.sample(1), TOKENS)
    made = chunk([sample], TOKENS).arrays
    held = {name: torch.from_numpy(array) for name, array in made.items()}
    length = held["ids"].shape[1]

    def alike(model, layer, entering, positions, first):
        return torch.zeros(1, length - first, length) - np.log(length)

    monkeypatch.setattr("document_network.looks", alike)
    found = looking_loss(model, [torch.empty(0)] * 4, held, len(TOKENS.head))
    numbers = sample.dense[:, 0].reshape(-1, 2, 2).max(-1)
    expected = 0.0
    for number in made["line"][0][made["line"][0] > 0]:
        rows = (numbers == number).any(-1).sum()
        expected += np.log(length / rows) if rows else 0
    assert found.item() == pytest.approx(expected, rel=1e-4)
