"""The document model: its shape in transformers and in our server, its forwards, its training's resumption, scores."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import document_samples
import document_scores as scores
import numpy as np
import pytest
import torch
from document_batches import PENALTIES, Plan, batch, chunk
from document_feed import Batch
from document_network import embedded, generate, image_rows, patch_states, text_states
from document_samples import Sample, block_sample, layout_sample, line_samples, read_blocks
from document_shape import IMAGE_MEAN, IMAGE_STD, MAX_FOLDER_BYTES, save_model
from document_tokens import ChatTokens
from document_trainer import DocumentTrainer, penalised
from evaluate_documents import HeldOut
from PIL import Image
from train import parse, run
from trainer import Trainer
from transformers import Qwen2VLForConditionalGeneration

import pages

TOKENS = ChatTokens()
SMALL = Plan(words=1, lines=2, patches=600, chunk=1200, layouts=0)


@pytest.fixture(scope="module")
def folder(model: Qwen2VLForConditionalGeneration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    save_model(folder, model.state_dict())
    return folder


def grid(sample: Sample) -> tuple[int, int, int]:
    rows, columns = (sample.places.max(0) + 1).tolist()
    return 1, rows, columns


def theirs(model: Qwen2VLForConditionalGeneration, sample: Sample, ids: torch.Tensor) -> torch.Tensor:
    """transformers' logits [length, vocabulary] of ids [1, length]."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGE_MEAN, IMAGE_STD))
    grey = torch.from_numpy(sample.patches).float()[:, None, None] / 255
    pixels = ((grey.expand(-1, 3, 2, -1) - mean) / std).flatten(1)
    kinds = (ids == model.config.image_token_id).int()
    grids = torch.tensor([grid(sample)])
    return model(input_ids=ids, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=kinds).logits[0]


def entering_text(
    model: Qwen2VLForConditionalGeneration, samples: list[Sample], answers: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A chunk's arrays and the embeddings that enter the text body."""
    held = {name: torch.from_numpy(array) for name, array in chunk(samples, TOKENS, answers).arrays.items()}
    states = patch_states(model, held["patches"], held["places"], held["lengths"])
    return held, embedded(model, held["ids"], image_rows(model, states), held["source"], held["to"])


def prompt(sample: Sample) -> torch.Tensor:
    held = chunk([sample], TOKENS, answers=False).arrays
    return torch.from_numpy(held["ids"]).long()


def test_the_folder_is_small_and_transformers_loads_all_of_it(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) <= MAX_FOLDER_BYTES
    _, told = Qwen2VLForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@torch.inference_mode()
def test_forwards_of_a_padded_chunk_are_transformers_own(
    model: Qwen2VLForConditionalGeneration, samples: list[Sample]
) -> None:
    chosen = [samples[0], samples[len(samples) // 2], samples[3]]
    held, x = entering_text(model, chosen, answers=True)
    logits = model.lm_head(text_states(model, x, held["positions"]))
    for index, sample in enumerate(chosen):
        length = int(held["prompts"][index]) + len(sample.answer) - 1
        expected = theirs(model, sample, held["ids"][index : index + 1, :length].long())
        torch.testing.assert_close(logits[index, :length], expected, atol=1e-4, rtol=0)
        asked = held["asked"][held["asked"] // held["ids"].shape[1] == index] % held["ids"].shape[1]
        assert asked.tolist() == list(range(length - len(sample.answer), length))


@torch.inference_mode()
def test_generated_answers_are_the_greedy_ones_under_the_penalties(
    model: Qwen2VLForConditionalGeneration, samples: list[Sample]
) -> None:
    chosen = [samples[0], samples[4]]
    held, x = entering_text(model, chosen, answers=False)
    found = generate(model, x, held["prompts"].long(), held["positions"], held["penalties"], 12)
    for sample, answer in zip(chosen, found, strict=True):
        ids, counts = prompt(sample), Counter[int]()
        once, each = PENALTIES[sample.step]
        for token in answer:
            logits = theirs(model, sample, ids)[-1]
            for seen, times in counts.items():
                logits[seen] -= once + each * times
            assert int(logits.argmax()) == token
            counts[token] += 1
            ids = torch.cat((ids, torch.tensor([[token]])), 1)
        assert len(set(answer)) > 3


def test_a_batch_is_made_from_its_number_alone() -> None:
    plan = Plan(words=0, lines=0, patches=3000, chunk=4000, layouts=1)
    first, again = batch(7, plan, TOKENS), batch(7, plan, TOKENS)
    other = batch(8, plan, TOKENS)
    assert [chunk.layout for chunk in first][-1] and len(first) == len(again)
    for one, two in zip(first, again, strict=True):
        assert all(np.array_equal(one.arrays[name], two.arrays[name]) for name in one.arrays)
    assert not np.array_equal(first[0].arrays["labels"], other[0].arrays["labels"])


def test_pieces_of_lines_say_together_what_the_block_says() -> None:
    page = pages.sample(1)
    picture = Image.fromarray(page.picture)
    block = max((b for b in page.blocks if b.kind == "text"), key=lambda b: len(b.answer))
    pieces = line_samples(page, picture, block, TOKENS, pages.Random(0), 3)
    assert " ".join(TOKENS.decode(piece.answer) for piece in pieces) == block.answer


def test_penalties_in_training_are_those_of_generation() -> None:
    logits = torch.zeros(5, 9)
    held = {
        "ids": torch.zeros(2, 10),
        "asked": torch.tensor([3, 4, 5, 12, 13]),
        "labels": torch.tensor([7, 7, 2, 1, 7]),
        "nth": torch.tensor([0, 1, 2, 0, 1]),
        "penalties": torch.tensor([[1.0, 0.5], [0.0, 0.25]]),
    }
    found = penalised(logits, held, 3, 1.0)
    expected = torch.zeros(5, 9)
    expected[1, 7], expected[2, 7] = -1.5, -2.0
    expected[4, 1] = -0.25
    torch.testing.assert_close(found, expected)
    assert torch.equal(penalised(logits, held, 3, 0.0), logits)


def test_a_run_that_stopped_goes_on_with_the_next_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends, to the last bit, with the weights of a run that did not stop."""
    options = ["--steps", "2", "--workers", "2", "--held-out", "0", "--words", "0", "--lines", "3"]
    options += ["--patches", "300", "--chunk", "600", "--layouts", "0"]

    def train(name: str, *more: str) -> None:
        run(
            parse(
                ["documents", "--state", str(tmp_path / name), "--out", str(tmp_path / f"{name}-out"), *options, *more]
            )
        )

    train("whole")
    original = Trainer.train_step

    def killed(self, *arguments):
        if self.step == 1:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(Trainer, "train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        train("cut", "--save-minutes", "0")
    monkeypatch.setattr(Trainer, "train_step", original)
    assert json.loads((tmp_path / "cut" / "progress.json").read_text())["step"] == 1
    train("cut")
    whole, cut = (torch.load(tmp_path / name / "weights.pt")["part"] for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_state_of_several_steps_is_refused(tmp_path: Path) -> None:
    trainer = DocumentTrainer(TOKENS, torch.device("cpu"), 1e-3)
    trainer.save_state(tmp_path)
    (tmp_path / "progress.json").write_text(json.dumps({"step": 5, "seconds": 1.0}))
    with pytest.raises(ValueError, match="several steps"):
        trainer.load_state(tmp_path)


def test_training_lowers_the_losses_of_crops_or_of_small_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_samples, "LAYOUT_SIDE", 140)
    layouts = [chunk([layout_sample(pages.sample(seed), TOKENS) for seed in (0, 1)], TOKENS)]
    crops = batch(0, SMALL, TOKENS)
    for made, steps, own, least in ((crops, 3, slice(2), [0.5, 1]), (layouts, 5, slice(2, 5), [1, 2, 0.02])):
        batches = [Batch(c, c.arrays.pop("patches"), torch.device("cpu")) for c in made]
        trainer = DocumentTrainer(TOKENS, torch.device("cpu"), 3e-3)
        trainer.step = 100  # past the slow beginning
        losses = np.array([trainer.train_step(batches, 0.0).tolist() for _ in range(steps)])
        assert (np.delete(losses, np.arange(5)[own], 1) == 0).all()
        assert (losses[-1, own] < losses[0, own] - least).all(), losses
    assert batches[0].layout and batches[0].full


def test_a_run_begins_with_a_checkpoint_s_weights(
    folder: Path, model: Qwen2VLForConditionalGeneration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on with its own, with all of the penalties from the first step on."""
    state = tmp_path / "state"
    options = (
        f"documents --steps 2 --workers 1 --held-out 0 --words 0 --lines 3 --begin {folder} --state {state}".split()
    )
    options += f"--patches 300 --chunk 600 --layouts 0 --out {tmp_path / 'out'}".split()
    begun = []

    def step(self, batches, progress):
        begun.append((self.step, progress, self.all_penalties, self.model.state_dict()["lm_head.weight"].clone()))
        self.step += 1
        self.model.lm_head.weight.data.add_(1)
        if self.step == 1 and len(begun) == 1:
            self.save_state(state)
            raise KeyboardInterrupt
        return torch.zeros(5)

    monkeypatch.setattr(Trainer, "train_step", step)
    with pytest.raises(KeyboardInterrupt):
        run(parse(options))
    run(parse(options))
    assert [(at, strength) for at, _, strength, _ in begun] == [(0, True), (1, True)]
    expected = model.state_dict()["lm_head.weight"]
    torch.testing.assert_close(begun[0][3], expected, atol=0, rtol=0)
    torch.testing.assert_close(begun[1][3], expected + 1)


def test_edits() -> None:
    cases = {("", ""): 0, ("abc", ""): 3, ("", "ab"): 2, ("kitten", "sitting"): 3, ("flaw", "lawn"): 2, ("ab", "ab"): 0}
    for (expected, got), number in cases.items():
        assert scores.edits(expected, got) == number
    assert scores.cer([("abcd", "abxd"), ("ab", "xxxxxxxx")]) == pytest.approx(3 / 6)


def test_true_answers_score_one_and_broken_ones_less() -> None:
    page = pages.sample(2)
    layout, tables = layout_sample(page, TOKENS), []
    answer = TOKENS.decode(layout.answer)
    assert scores.layout_f1([(answer, answer)]) == 1
    lines = answer.split("\n")
    assert scores.layout_f1([(answer, "\n".join(lines[1:]))]) == pytest.approx(
        2 * (len(lines) - 1) / (2 * len(lines) - 1)
    )
    assert scores.layout_f1([(answer, "nothing")]) == 0
    tables = [("<fcel>a<fcel>b<nl><fcel>c<ecel><nl>", "<fcel>a<fcel>x<nl><fcel>c<ecel><nl>")]
    assert scores.cell_f1(tables) == pytest.approx(0.75)
    assert scores.overlap((0, 0, 10, 10), (5, 0, 15, 10)) == pytest.approx(1 / 3)


def test_held_out_answers_keep_their_order(model: Qwen2VLForConditionalGeneration, monkeypatch) -> None:
    """Whatever they are grouped by: here each answers with its own size."""
    held_out = HeldOut(0, TOKENS)
    picture_page = pages.sample(4, "heldout")
    picture = Image.fromarray(picture_page.picture)
    held_out.samples = [
        block_sample(picture_page, picture, block, TOKENS, None) for block in read_blocks(picture_page)[:5]
    ]

    def answered(self, model, indices, device):
        return {index: str(len(self.samples[index].patches)) for index in indices}

    monkeypatch.setattr(HeldOut, "_answered", answered)
    answers = held_out.answers(model, torch.device("cpu"))
    assert answers == [str(len(sample.patches)) for sample in held_out.samples]
