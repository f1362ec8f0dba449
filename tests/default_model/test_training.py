"""The default model's training code, and the checkpoint that it made, on a CPU."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from architecture import (
    IMAGE_MEAN,
    IMAGE_STD,
    MAX_FOLDER_BYTES,
    MAX_PARAMETERS,
    build_model,
    load_processor,
)
from augment import DEFAULT, TWO_TILES, Policy, QuickCutter, cut, layout, patch_targets, random_policy, tile_windows
from evaluate_rooms import answers, figures, load, picture
from PIL import Image
from room_feed import Asked, Asking, Balance, Batch, Batches, Renderers, Store
from room_network import image_rows, patch_states, text_states
from rooms import RoomTrainer
from sequences import ChatTokens, pack
from train import parse, run
from transformers import AutoModelForImageTextToText

import scene

CHECKPOINT = Path(__file__).parents[2] / "build" / "default_model" / "checkpoint"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def chat() -> ChatTokens:
    return ChatTokens(CHECKPOINT / "tokenizer.json")


class Rooms:
    """A world of one class: a red square that is there or not."""

    HAZARDS = ("square",)

    @staticmethod
    def sample(seed: int, split: str) -> SimpleNamespace:
        rng = random.Random(f"{split}/{seed}")
        return SimpleNamespace(
            there=rng.random() < 0.5, x=rng.randrange(20, 60), size=rng.choice([(90, 90), (120, 80)])
        )

    @staticmethod
    def encode_jpeg(drawn: SimpleNamespace) -> bytes:
        width, height = drawn.size
        pixels = np.full((height, width, 3), 200, np.uint8)
        if drawn.there:
            pixels[20:50, drawn.x : drawn.x + 30] = (20, 20, 220)
        return cv2.imencode(".jpg", pixels)[1].tobytes()

    @staticmethod
    def boxes(drawn: SimpleNamespace) -> list[tuple[str, float, float, float, float]]:
        return [("square", drawn.x, 20, drawn.x + 30, 50)] if drawn.there else []

    @staticmethod
    def questions(drawn: SimpleNamespace) -> list[SimpleNamespace]:
        answer = "yes" if drawn.there else "no"
        return [SimpleNamespace(text="Is there a square?", answer=answer, kind="presence", cls="square")]


def drawn_batch(chat: ChatTokens, tiles: int, policy: Policy) -> Batch:
    asking = Asking(chat, lambda group: 1.0, questions=2, length=32)
    renderers = Renderers(Rooms, asking, ["square"], workers=0, first_seed=0)
    store = Store(renderers, 2_000_000, torch.device("cpu"))
    while store.received < 12:
        time.sleep(0.01)
    batches = Batches(store, tiles, seed=0, policy=lambda rng: policy)
    batch = batches.next()
    for part in (batches, store, renderers):
        part.close()
    return batch


def test_checkpoint_is_within_its_limits() -> None:
    model = AutoModelForImageTextToText.from_pretrained(CHECKPOINT, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) <= MAX_PARAMETERS
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= MAX_FOLDER_BYTES
    for config in (model.config.text_config, model.config.vision_config):
        assert config.hidden_size % 128 == 0 and config.intermediate_size % 128 == 0
        assert config.hidden_size // config.num_attention_heads == 64


def test_tokenizer_gives_any_text_back(chat: ChatTokens) -> None:
    text = 'A "Zwölf" & ~{3}\t[x] 東京 ?!'
    assert chat.decode(chat.tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("size", [(450, 300), (300, 320), (200, 640)])
def test_many_questions_give_what_transformers_gives_one_by_one(chat: ChatTokens, size: tuple[int, int]) -> None:
    """Ids equal those of the processor; logits of every branch equal a forward pass of its own."""
    width, height = size
    model = build_model(seed=3).eval()
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    processor = load_processor(CHECKPOINT)
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


@pytest.mark.parametrize("size", [(1000, 700), (320, 240), (240, 427)])
def test_quick_cut_is_within_a_grey_level_of_the_exact_one(size: tuple[int, int]) -> None:
    width, height = size
    pixels = torch.from_numpy(np.random.default_rng(1).integers(0, 255, (height, width, 3), dtype=np.uint8))
    plan = layout(width, height, Policy(1, 6))
    exact = cut(pixels, plan)
    quick = torch.zeros_like(exact)
    QuickCutter(torch.device("cpu"))(pixels, plan, quick)
    difference = (exact.int() - quick.int()).abs()
    assert difference.max() <= 1 and difference.float().mean() < 0.1


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


def test_steps_reduce_the_loss_of_a_fixed_batch(chat: ChatTokens) -> None:
    batch = drawn_batch(chat, tiles=3, policy=Policy(1, 1))
    trainer = RoomTrainer(chat, 1, 3, torch.device("cpu"), lr=3e-3)
    trainer.step = 300  # past the warm-up
    first, *_, last = [trainer.train_step(batch, 0.0) for _ in range(4)]
    assert last[0] < 0.8 * first[0] and last[1] < first[1], (first, last)


def test_a_resumed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoomTrainer, "WORLD", Rooms)
    out = tmp_path / "checkpoint"
    out.mkdir()
    (out / "tokenizer.json").write_bytes((CHECKPOINT / "tokenizer.json").read_bytes())
    common = f"rooms --out {out} --state {tmp_path / 'state'} --workers 0 --tiles 13 --length 32"
    common += " --warm-pictures 4 --store-gb 0.002"
    assert run(parse(f"{common} --steps 1".split()))["steps"] == 1
    weights = torch.load(tmp_path / "state" / "weights.pt")["part"]
    assert run(parse(f"{common} --steps 2".split()))["steps"] == 2
    after = torch.load(tmp_path / "state" / "weights.pt")["part"]
    moved = max((after[name] - weights[name]).abs().max().item() for name in weights)
    assert 0 < moved < 0.05  # one step away, not a fresh start
    assert (out / "model.safetensors").exists()


def test_checkpoint_answers_heldout_pictures() -> None:
    """Yes/no about hazards on the first held-out pictures: chance is half."""
    items = [
        i for i in scene.heldout(60) if i.kind == "presence" and i.cls in scene.HAZARDS and i.width * i.height < 500_000
    ]
    items = items[:10]
    model, chat = load(CHECKPOINT, torch.device("cpu"))
    texts = answers(
        model, chat, items, [picture(i.scene_seed) for i in items], Policy(1, 12), torch.device("cpu"), batch=2
    )
    right = sum(text == item.answer for item, text in zip(items, texts, strict=True))
    assert len(items) == 10 and right >= 9, list(zip(items, texts, strict=True))


def test_figures_count_balanced_accuracy_and_precision() -> None:
    def item(answer: str) -> SimpleNamespace:
        return SimpleNamespace(answer=answer, kind="presence", cls="crack", width=1920, height=1080)

    items = [item("yes")] * 4 + [item("no")] * 2
    result = figures(items, ["yes", "yes", "yes", "no", "yes", "no"], ["crack", "damp"])
    assert result["recall"] == {"crack": pytest.approx((0.75 + 0.5) / 2)}
    assert result["precision_yes"] == 0.75 and result["exact_large"] == pytest.approx(4 / 6, abs=1e-4)
