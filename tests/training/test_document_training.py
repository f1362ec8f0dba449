"""Training on documents: forwards as transformers', batches, targets, where a run begins, scores."""

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path

import document_scores as scores
import numpy as np
import pytest
import torch
from answer_sheet import RIGHT, WRONG, write
from checkpoints import DOCUMENTS
from document_batches import PENALTIES, Batch, Plan, batch, chunk
from document_network import LOOKING, embedded, image_rows, looks, patch_states, text_states
from document_samples import Sample, block_sample, layout_sample
from document_tokens import PROMPTS, SYSTEM, ChatTokens
from document_trainer import DocumentTrainer, penalised
from evaluate import HeldOut, failures, inputs, unpatched, write_failures
from PIL import Image, ImageColor
from safetensors.torch import load_file
from table_similarity import table, teds
from train import parse, run
from trainer import Trainer
from transformers import Qwen2VLForConditionalGeneration

import pages
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest

TOKENS = ChatTokens()


def theirs(model: Qwen2VLForConditionalGeneration, sample: Sample, answer: list[int]) -> torch.Tensor:
    """transformers' logits [length, vocabulary] of a prompt and what is answered so far."""
    held, told = inputs([sample], TOKENS), torch.tensor([answer], dtype=torch.int64)
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        more = told if name == "input_ids" else torch.full_like(told, name == "attention_mask")
        held[name] = torch.cat((held[name], more), 1)
    return model(**held).logits[0]


@torch.inference_mode()
def test_forwards_of_a_padded_chunk_are_transformers_own(
    model: Qwen2VLForConditionalGeneration, samples: list[Sample]
) -> None:
    chosen = [samples[0], samples[len(samples) // 2], samples[3]]
    held = {name: torch.from_numpy(array) for name, array in chunk(chosen, TOKENS).arrays.items()}
    states, entering = patch_states(model, held["patches"], held["places"], held["lengths"]), []
    x = embedded(model, held["ids"], image_rows(model, states), held["source"], held["to"])
    logits = model.lm_head(text_states(model, x, held["positions"], entering))
    for index, sample in enumerate(chosen):
        expected = theirs(model, sample, sample.answer[:-1])
        torch.testing.assert_close(logits[index, : len(expected)], expected, atol=1e-4, rtol=0)
        asked = held["asked"][held["asked"] // held["ids"].shape[1] == index] % held["ids"].shape[1]
        assert asked.tolist() == list(range(len(expected) - len(sample.answer), len(expected)))
    attend_eagerly = model.model.language_model
    attend_eagerly.config._attn_implementation = "eager"
    attentions = attend_eagerly(inputs_embeds=x, position_ids=held["positions"], output_attentions=True).attentions
    for layer in (0, *LOOKING):
        found = looks(model, layer, entering[layer], held["positions"], 20).exp()
        torch.testing.assert_close(found, attentions[layer][:, 0, 20:], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_generated_answers_are_the_greedy_ones_under_the_penalties(
    model: Qwen2VLForConditionalGeneration, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatTokens, "decode", lambda self, ids: ids)
    held_out = HeldOut(0, TOKENS)
    held_out.samples = chosen = [samples[0], samples[4]]
    for sample, answer in zip(chosen, held_out.answers(model, torch.device("cpu")), strict=True):
        counts = Counter[int]()
        once, each = PENALTIES[sample.step]
        for place, token in enumerate(answer[:12]):
            logits = theirs(model, sample, answer[:place])[-1]
            for seen, times in counts.items():
                logits[seen] -= once + each * times
            assert int(logits.argmax()) == token
            counts[token] += 1
        assert len(counts) > 3


def test_a_batch_is_made_from_its_number_alone() -> None:
    plan = Plan(patches=3000, chunk=4000, layouts=1)
    first, again = batch(7, plan, TOKENS), batch(7, plan, TOKENS)
    other = batch(8, plan, TOKENS)
    assert [chunk.layout for chunk in first][-1] and len(first) == len(again)
    for one, two in zip(first, again, strict=True):
        assert all(np.array_equal(one.arrays[name], two.arrays[name]) for name in one.arrays)
    assert not np.array_equal(first[0].arrays["labels"], other[0].arrays["labels"])


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


def test_a_run_begins_with_a_checkpoint_s_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on with its own, with all of the penalties from the first step on."""
    state = tmp_path / "state"
    options = f"documents --steps 2 --workers 1 --held-out 0  --begin {DOCUMENTS} --state {state}"
    options += f" --patches 300 --chunk 600 --layouts 0 --out {tmp_path / 'out'}"
    begun = []

    def step(self, batches, progress):
        begun.append((self.step, self.all_penalties, self.model.state_dict()["lm_head.weight"].clone()))
        self.step += 1
        self.model.lm_head.weight.data.add_(1)
        if self.step == 1 and len(begun) == 1:
            self.save_state(state)
            raise KeyboardInterrupt
        return torch.zeros(5)

    monkeypatch.setattr(Trainer, "train_step", step)
    with pytest.raises(KeyboardInterrupt):
        run(parse(options.split()))
    run(parse(options.split()))
    assert [(at, all_penalties) for at, all_penalties, _ in begun] == [(0, True), (1, True)]
    expected = load_file(DOCUMENTS / "model.safetensors")["model.embed_tokens.weight"].float()
    torch.testing.assert_close(begun[0][2], expected, atol=0, rtol=0)
    torch.testing.assert_close(begun[1][2], expected + 1)


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
        assert pages.KINDS[kind - 1] == block.kind and tuple(box) == pages.thousandths(block.box, page)
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


def test_a_pruned_sample_is_what_the_server_makes_of_its_picture() -> None:
    sample = layout_sample(pages.sample(3), TOKENS)
    buffer = io.BytesIO()
    Image.fromarray(unpatched(sample)).convert("RGB").save(buffer, "PNG")
    content = [{"type": "image"}, {"type": "text", "text": PROMPTS["layout"]}]
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    asked = PreprocessRequest(messages=turns, images=[buffer.getvalue()], tile_policy={"prune": "equal"})
    served = Preprocessor.from_checkpoint(DOCUMENTS)(asked)
    pruned, before = sample.pruned(), served.input_ids
    held = chunk([pruned], TOKENS).arrays
    assert len(pruned.patches) < len(sample.patches)
    assert np.array_equal(held["ids"][0, : len(before)], before)
    assert np.array_equal(held["positions"][:, 0, : len(before)], served.positions)
    bits = -(-len(sample.patches) // 32)
    assert np.array_equal(held["patches"][0].ravel(), served.pixels[bits:].reshape(-1, 3)[:, 0])


def test_pruned_layouts_side_by_side_lose_what_each_does_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, cpu = DocumentTrainer(TOKENS, torch.device("cpu"), 1e-3), torch.device("cpu")
    monkeypatch.setattr(
        "document_trainer.random_gain", lambda count, *_: torch.tensor([[1.0], [0.0]]).expand(count, 2, 3)
    )
    for layer in (trainer.head.patch, trainer.head.row):
        torch.nn.init.normal_(layer.weight, std=0.02)

    @torch.inference_mode()
    def lost(samples: list[Sample]) -> dict[str, torch.Tensor]:
        made = chunk(samples, TOKENS)
        together = Batch(made, made.arrays.pop("patches"), cpu)
        return trainer.chunk_losses(together, 1.0, torch.Generator())

    samples = [layout_sample(pages.sample(number), TOKENS).pruned() for number in (3, 5)]
    apart = [lost([sample]) for sample in samples]
    assert len(samples[0].patches) != len(samples[1].patches)
    for name, value in lost(samples).items():
        torch.testing.assert_close(value, apart[0][name] + apart[1][name], rtol=1e-4, atol=0)


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
        block_sample(picture_page, picture, block, TOKENS, None) for block in pages.read_blocks(picture_page)[:5]
    ]

    def answered(self, model, indices, device):
        return {index: str(len(self.samples[index].patches)) for index in indices}

    monkeypatch.setattr(HeldOut, "_answered", answered)
    answers = held_out.answers(model, torch.device("cpu"))
    assert answers == [str(len(sample.patches)) for sample in held_out.samples]


def test_what_was_read_worst_is_shown(samples: list[Sample], tmp_path: Path) -> None:
    """The worst two of each step and none without a fault, a page with its true boxes and those read; never too large a
    file."""
    layout = "<|box_start|>{} 100 900 900<|box_end|><|ref_start|>text<|ref_end|><|rotate_up|>"
    page = replace(samples[0], step="layout", answer=TOKENS.answer(layout.format("100")))
    page.patches, page.places = np.full((484, 196), 255, np.uint8), np.indices((22, 22)).reshape(2, -1).T
    held_out = HeldOut(0, TOKENS)
    held_out.samples = [page, *samples[:4]]
    worst = failures(held_out, [layout.format("600"), "", TOKENS.decode(samples[1].answer), "", ""])
    assert [failure.error for failure in worst] == [1, 1, 1, 1, 0]
    picture = np.asarray(next(failure.picture for failure in worst if failure.sample is page)).astype(int)
    seen = [picture[150, at].tolist() for at in (31, 120, 186)]
    assert seen == [[*ImageColor.getrgb(RIGHT)], [255] * 3, [*ImageColor.getrgb(WRONG)]]
    write_failures(tmp_path, worst, 2)
    assert {file.name for file in tmp_path.iterdir()} == {"00.png", "01.png", "failures.txt", "sheet.webp"}
    size, shown = (tmp_path / "sheet.webp").stat().st_size, [failure.entry for failure in worst[:3]]
    write(tmp_path / "small.webp", shown, 2, most_bytes=size * 3 // 4)
    assert (tmp_path / "small.webp").stat().st_size <= size * 3 // 4


TABLE = "<fcel>a<fcel>b<nl><fcel>1<fcel>22<nl>"  # two rows of two cells: six nodes


@pytest.mark.parametrize(
    ("got", "distance"),
    [
        (TABLE, 0),
        ("<fcel>a<fcel>b<nl><fcel>1<fcel>23<nl>", 0.5),  # half of a cell's characters
        ("<fcel>a<fcel>b<nl><fcel>1<ecel><nl>", 1),
        ("<fcel>a<fcel>b<nl><fcel>1<nl>", 1),  # a cell is missing
        ("<fcel>a<fcel>b<nl>", 3),  # a row and its cells
        ("<fcel>1<fcel>22<nl>", 3),  # the first one: the second is not taken for it
        ("<fcel>a<lcel><nl><fcel>1<fcel>22<nl>", 2),  # another span, and a cell less
        ("<fcel>a<fcel>b<nl><ucel><fcel>22<nl>", 2),
        ("<fcel>x<fcel>y<nl>" + TABLE, 3 / 9 * 6),  # of nine nodes
        ("", 6),
        ("nothing of a table", 6),
    ],
)
def test_distances_by_hand(got: str, distance: float) -> None:
    assert teds([(TABLE, got)]) == teds([(got, TABLE)]) == pytest.approx(1 - distance / 6)


def test_the_mean_is_over_tables() -> None:
    assert teds([(TABLE, TABLE), (TABLE, "")]) == 0.5
    assert teds([("", "")]) == 1 and teds([]) == 0


def test_spans_are_of_the_cell_that_begins_them() -> None:
    rows = table("<fcel>a<lcel><fcel>b<nl><ucel><xcel><fcel>c<nl><fcel>d<ecel><fcel>e<nl>")
    assert [[(columns, high, text) for (_, columns, high, text), _ in cells] for _, cells in rows] == [
        [(2, 2, "a"), (1, 1, "b")],
        [(1, 1, "c")],
        [(1, 1, "d"), (1, 1, ""), (1, 1, "e")],
    ]
