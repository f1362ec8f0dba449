"""Training on rooms: forwards and tiles as transformers', targets, what is asked how often."""

import random

import cv2
import numpy as np
import pytest
import torch
from augment import DEFAULT, TWO_TILES, Cutter, Layout, Policy, layout, patch_targets, random_policy, tile_windows
from bench.ladder_transformers import Loop
from checkpoints import ROOMS, fresh_model, load_processor
from PIL import Image
from room_feed import Asked, Balance
from room_network import IMAGE_MEAN, IMAGE_STD, image_rows, patch_states, text_states
from sequences import ChatTokens, pack

import scene


@pytest.fixture(scope="module")
def chat() -> ChatTokens:
    return ChatTokens()


def cut(pixels: torch.Tensor, plan: Layout) -> torch.Tensor:
    tiles = torch.zeros(plan.tiles, 3, 448, 448, dtype=torch.uint8)
    Cutter(torch.device("cpu"))(pixels, plan, tiles)
    return tiles


@pytest.mark.parametrize("size", [(450, 300), (300, 320), (200, 640)])
def test_many_questions_give_what_transformers_gives_one_by_one(chat: ChatTokens, size: tuple[int, int]) -> None:
    """Ids equal those of the processor; logits of every branch equal a forward pass of its own."""
    width, height = size
    model = fresh_model(ROOMS, seed=3).eval()
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    processor = load_processor(ROOMS)
    pixels = cv2.resize(np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8), size)
    asked = [("Is there a crack?", "yes"), ("How many chairs are there?", "3")]
    policy = Policy(1, 3)
    plan = layout(width, height, policy)
    tiles = cut(torch.from_numpy(pixels), plan)
    packed = pack([[chat.branch(*pair) for pair in asked]], 64)
    with torch.no_grad():
        rows = image_rows(model, patch_states(model, tiles)).flatten(0, 1)[None]
        prefix = torch.tensor(chat.prefix(plan.tiles))
        tensors = [torch.from_numpy(getattr(packed, name)) for name in ("ids", "number", "position")]
        ours = model.lm_head(text_states(model, prefix, rows, *tensors, len(chat.head)))[0]
        for number, (question, answer) in enumerate(asked):
            content = [{"type": "image"}, {"type": "text", "text": question}]
            text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
            inputs = processor(
                images=[Image.fromarray(pixels)],
                text=[text + answer + "<|im_end|>"],
                images_kwargs={"max_patches": policy.max_tiles},
                return_tensors="pt",
            )
            branch = chat.branch(question, answer)
            assert inputs["input_ids"][0].tolist() == [*chat.prefix(plan.tiles), *branch.ids]
            mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (IMAGE_MEAN, IMAGE_STD))
            assert (inputs["pixel_values"] - (tiles / 255 - mean) / std).abs().max() < 0.06  # three grey levels
            inputs["pixel_values"] = (tiles / 255 - mean) / std
            theirs = model(**inputs).logits[0, -len(branch.ids) :]
            torch.testing.assert_close(ours[tensors[1][0] == number], theirs, rtol=1e-4, atol=1e-4)


def test_grids_follow_the_reference_rule() -> None:
    rng = random.Random(0)
    assert layout(1920, 1080, DEFAULT).tiles == 9
    assert layout(480, 320, TWO_TILES).tiles == 2
    assert all(1 <= layout(640, 480, random_policy(rng)).tiles <= 13 for _ in range(100))


def test_cut_and_windows_agree() -> None:
    """A white rectangle on black lights exactly the patches that the dense supervision marks."""
    pixels = torch.zeros(448 * 2, 448 * 3, 3, dtype=torch.uint8)
    x0, y0, x1, y1 = 420, 28, 504, 84  # three by two patches, across two tiles
    pixels[y0:y1, x0:x1] = 255
    plan = layout(448 * 3, 448 * 2, DEFAULT)
    assert (plan.columns, plan.rows, plan.thumbnail) == (3, 2, True)
    tiles = cut(pixels, plan).float().mean(1)
    bright = tiles.view(-1, 16, 28, 16, 28).mean((2, 4)) > 127
    box = torch.tensor([[1, x0 / 1344, y0 / 896, x1 / 1344, y1 / 896], [-1, -1, -1, -1, -1]]).expand(7, -1, -1)
    covered, centred = patch_targets(box, torch.tensor(tile_windows(plan)), classes=3)
    assert torch.equal(covered[:6, :, :, 1], bright[:6])
    assert covered[6, :, :, 1].any() and not covered[..., 0].any() and not covered[..., 2].any()
    assert centred.flatten(1).sum(1).tolist() == [0, 1, 0, 0, 0, 0, 1]


def test_balance_asks_every_group_about_equally_often(chat: ChatTokens) -> None:
    branch = chat.branch("Is there a crack?", "no")
    balance, rng = Balance(lambda group: 1.0), random.Random(0)
    for _ in range(400):
        rare = [Asked(("presence", "crack", "yes"), branch)] if rng.random() < 0.3 else []
        balance.choose([*rare, *(Asked(("presence", "crack", "no"), branch) for _ in range(1 - len(rare))),
                        Asked(("presence", "damp", "no"), branch)], 1, rng)  # fmt: skip
    assert balance.asked["presence", "crack", "yes"] > 80  # nearly all of about 120: it was always the one most due
    assert balance.asked["presence", "damp", "no"] < 250


def test_the_tracked_checkpoint_answers_heldout_pictures() -> None:
    """Yes/no about hazards on the first held-out pictures: chance is half."""
    asked = [i for i in scene.heldout(60) if i.kind == "presence" and i.cls in scene.HAZARDS]
    asked = [i for i in asked if i.width * i.height < 500_000][:10]
    loop = Loop(ROOMS, "cpu", random_weights=False)
    told = [loop.answer(scene.encode_jpeg(scene.sample(i.scene_seed, "heldout")), i.question) for i in asked]
    assert len(asked) == 10 and sum(text == i.answer for i, text in zip(asked, told)) >= 9, list(zip(asked, told))
