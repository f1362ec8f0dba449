"""How well the document model reads the held-out pages, by transformers.

    python build/training/evaluate.py documents --pages 200 --workers 15 --failures failures | python loadtest/record.py

Greedy answers under the penalties of MinerU's client. Prints figures for loadtest/record.py: `docs.cer` (edits over
characters of all text crops), `docs.layout_f1` (blocks of the right kind at an overlap of 0.5),
`docs.table_cell_f1` (cells in their place with their whole text), `docs.table_teds` (table_similarity.py),
`docs.formula_cer`. Crops are cut from the true boxes, as the layout step says them: errors of the two steps are counted
apart.
"""

import argparse
import multiprocessing
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.extend(
    str(Path(__file__).resolve().parents[2] / room) for room in ("build", "build/document_model", "loadtest")
)

import cv2
import document_scores as scores
import numpy as np
import torch
from answer_sheet import RIGHT, WRONG, Entry, write
from checkpoints import DOCUMENTS, IM_END, PAD
from document_batches import PENALTIES, prompt
from document_network import IMAGE_MEAN, IMAGE_STD
from document_samples import Sample, block_sample, layout_sample
from document_tokens import IMAGE_PAD, ChatTokens
from figures import emit
from PIL import Image, ImageDraw
from table_similarity import teds
from transformers import LogitsProcessor, LogitsProcessorList, Qwen2VLForConditionalGeneration

import pages

BUDGET = 96_000
"""Patches that are looked at together."""
ROOM = 1.25
"""An answer may be longer than the true one by this factor before it is cut off."""


def page_samples(seed: int) -> list[Sample]:
    """All that is asked about a held-out page."""
    tokens = ChatTokens()
    page = pages.sample(seed, "heldout")
    picture = Image.fromarray(page.picture)
    return [
        layout_sample(page, tokens),
        *(block_sample(page, picture, block, tokens, None) for block in pages.read_blocks(page)),
    ]


def inputs(samples: Sequence[Sample], tokens: ChatTokens) -> dict[str, torch.Tensor]:
    """What transformers' model takes to answer samples: prompts padded on their left, pictures one behind the other."""
    prompts = [prompt(sample, tokens) for sample in samples]
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(each)) + each for each in prompts])
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGE_MEAN, IMAGE_STD))
    grey = torch.from_numpy(np.concatenate([sample.patches for sample in samples])).float()[:, None, None] / 255
    return {
        "input_ids": ids,
        "attention_mask": torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts]),
        "mm_token_type_ids": (ids == IMAGE_PAD).int(),
        "pixel_values": ((grey.expand(-1, 3, 2, -1) - mean) / std).flatten(1),
        "image_grid_thw": torch.tensor([(1, *(sample.places.max(0) + 1).tolist()) for sample in samples]),
    }


class Penalties(LogitsProcessor):
    """Those of MinerU's client [samples, 2], taken off a token's logit once and for each time that it was answered."""

    def __init__(self, length: int, penalties: torch.Tensor) -> None:
        self._length = length
        self._once, self._each = penalties.split(1, 1)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        answers = input_ids[:, self._length :]
        counts = torch.zeros_like(scores).scatter_add_(1, answers, torch.ones_like(answers, dtype=scores.dtype))
        return scores - self._once * (counts > 0) - self._each * counts


class HeldOut:
    """The first ``count`` held-out pages, asked once. Forks for ``workers`` > 1: before CUDA is touched."""

    def __init__(self, count: int, tokens: ChatTokens, workers: int = 1) -> None:
        self.tokens = tokens
        cv2.setNumThreads(1)  # as in feed
        if workers > 1:
            with multiprocessing.get_context("fork").Pool(workers) as pool:
                found = pool.map(page_samples, range(count), chunksize=2)
        else:
            found = [page_samples(seed) for seed in range(count)]
        self.samples = [sample for page in found for sample in page]

    def answers(self, model: Qwen2VLForConditionalGeneration, device: torch.device) -> list[str]:
        """The answer to each sample, in their order."""
        found: dict[int, str] = {}
        waiting: list[int] = []
        # Answers of one length together: a batch is as slow as its longest.
        order = sorted(
            range(len(self.samples)), key=lambda i: (self.samples[i].step == "layout", len(self.samples[i].answer))
        )
        for index in order:
            if waiting and sum(len(self.samples[i].patches) for i in [*waiting, index]) > BUDGET:
                found |= self._answered(model, waiting, device)
                waiting = []
            waiting.append(index)
        found |= self._answered(model, waiting, device)
        return [found[index] for index in range(len(self.samples))]

    @torch.inference_mode()
    def _answered(
        self, model: Qwen2VLForConditionalGeneration, indices: Sequence[int], device: torch.device
    ) -> dict[int, str]:
        samples = [self.samples[i] for i in indices]
        held = {name: tensor.to(device) for name, tensor in inputs(samples, self.tokens).items()}
        length = held["input_ids"].shape[1]
        penalties = torch.tensor([PENALTIES[sample.step] for sample in samples], device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            got = model.generate(
                **held,
                do_sample=False,
                eos_token_id=IM_END,
                pad_token_id=PAD,
                max_new_tokens=int(ROOM * max(len(sample.answer) for sample in samples)) + 8,
                logits_processor=LogitsProcessorList([Penalties(length, penalties)]),
            )
        return {index: self.tokens.decode(ids) for index, ids in zip(indices, got[:, length:].tolist())}

    def pairs(self, answers: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
        """(expected, got) by step."""
        found: dict[str, list[tuple[str, str]]] = {"layout": [], "text": [], "table": [], "equation": []}
        for sample, answer in zip(self.samples, answers, strict=True):
            found[sample.step].append((self.tokens.decode(sample.answer), answer))
        return found

    def figures(self, model: Qwen2VLForConditionalGeneration, device: torch.device) -> dict[str, float]:
        """Those of :func:`figures`; none where there are no pages."""
        return figures(self.pairs(self.answers(model, device))) if self.samples else {}


def figures(pairs: dict[str, list[tuple[str, str]]]) -> dict[str, float]:
    """By name, of those steps that were asked at all."""
    scored = {
        "cer": (scores.cer, "text"),
        "layout_f1": (scores.layout_f1, "layout"),
        "table_cell_f1": (scores.cell_f1, "table"),
        "table_teds": (teds, "table"),
        "formula_cer": (scores.cer, "equation"),
    }
    return {name: round(score(pairs[step]), 4) for name, (score, step) in scored.items() if pairs[step]}


@dataclass(frozen=True)
class Failure:
    """``error``: its share, 0..1."""

    sample: Sample
    error: float
    expected: str
    got: str

    @property
    def picture(self) -> Image.Image:
        """As it was asked about; a page with the true boxes and those read."""
        picture = Image.fromarray(unpatched(self.sample)).convert("RGB")
        for answer, colour in ((self.expected, RIGHT), (self.got, WRONG)) if self.sample.step == "layout" else ():
            for _, box in scores.blocks(answer):
                edges = [side / 1000 * picture.width for side in box]
                ImageDraw.Draw(picture).rectangle(edges, outline=colour, width=4)
        return picture

    def told(self, answer: str) -> str:
        if self.sample.step != "layout":
            return answer
        return ", ".join(
            f"{count} {kind}" for kind, count in Counter(kind for kind, _ in scores.blocks(answer)).items()
        )

    @property
    def entry(self) -> Entry:
        texts = (f"{self.sample.kind}: error {self.error:.0%}", "true: " + self.told(self.expected))
        return Entry(self.picture, [*zip((*texts, "read: " + self.told(self.got)), ("black", RIGHT, WRONG))])


def failures(held_out: HeldOut, answers: Sequence[str]) -> list[Failure]:
    """What was made of all samples, the worst first."""
    found = []
    for sample, got in zip(held_out.samples, answers, strict=True):
        expected = held_out.tokens.decode(sample.answer)
        share = 1 - scores.layout_f1([(expected, got)]) if sample.step == "layout" else scores.cer([(expected, got)])
        found.append(Failure(sample, share, expected, got))
    return sorted(found, key=lambda failure: -failure.error)


def write_failures(folder: Path, worst: Sequence[Failure], most: int) -> None:
    """What was read worst as PNG files, what was read in failures.txt, and the worst two of each step in sheet.webp."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "failures.txt").open("w", encoding="utf-8") as file:
        for rank, each in enumerate(worst[:most]):
            Image.fromarray(unpatched(each.sample)).save(folder / f"{rank:02d}.png")
            file.write(f"{rank:02d}.png {each.sample.kind} error {each.error:.3f}\nexpected: {each.expected}\n")
            file.write(f"got:      {each.got}\n\n")
    steps = [[each for each in worst if each.sample.step == step and each.error > 0][:2] for step in PENALTIES]
    if shown := [each.entry for of_step in steps for each in of_step]:
        write(folder / "sheet.webp", shown, columns=2, most_bytes=300_000)


def unpatched(sample: Sample) -> np.ndarray:
    """The picture of a sample, uint8 [height, width]."""
    rows, columns = sample.places.max(0) + 1
    grid = np.empty((rows, columns, 14, 14), np.uint8)
    grid[sample.places[:, 0], sample.places[:, 1]] = sample.patches.reshape(-1, 14, 14)
    return grid.transpose(0, 2, 1, 3).reshape(rows * 14, columns * 14)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["documents"], help="(`make bench NAME=recall` is the rooms')")
    parser.add_argument("--checkpoint", type=Path, default=DOCUMENTS)
    parser.add_argument("--workers", type=int, default=1, help="processes that render")
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--failures", type=Path, help="folder for pictures of what was read worst")
    parser.add_argument("--shown", type=int, default=24, help="how many of these")
    arguments = parser.parse_args(argv)
    held_out = HeldOut(arguments.pages, ChatTokens(), arguments.workers)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Qwen2VLForConditionalGeneration.from_pretrained(arguments.checkpoint, dtype=torch.float32).to(device).eval()
    answers = held_out.answers(model, device)
    command = f"python build/training/evaluate.py documents --pages {arguments.pages}"
    for name, value in figures(held_out.pairs(answers)).items():
        emit(f"docs.{name}", value, "share", command, pages=arguments.pages, samples=len(held_out.samples))
    if arguments.failures:
        write_failures(arguments.failures, failures(held_out, answers), arguments.shown)


if __name__ == "__main__":
    main()
