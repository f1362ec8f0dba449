"""How well the document model reads the held-out pages, in plain torch.

Greedy answers under the penalties of MinerU's client. Prints figures for loadtest/record.py: `docs.cer` (edits over
characters of all text crops), `docs.layout_f1` (blocks of the right kind at an overlap of 0.5),
`docs.table_cell_f1` (cells in their place with their whole text), `docs.table_teds` (table_similarity.py),
`docs.formula_cer`. Crops are cut from the true boxes, as the layout step says them: errors of the two steps are counted
apart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path

import cv2
import document_scores as scores
import numpy as np
import torch
from document_batches import chunk
from document_network import embedded, generate, image_rows, patch_states
from document_samples import Sample, block_sample, layout_sample, read_blocks
from document_tokens import ChatTokens
from failure_sheet import Failure, chosen, sheet
from PIL import Image
from table_similarity import teds
from transformers import Qwen2VLForConditionalGeneration

import pages

BUDGET = 96_000
"""Patches that are looked at together, padding included."""
ROOM = 1.25
"""An answer may be longer than the true one by this factor before it is cut off."""


def page_samples(seed: int) -> list[Sample]:
    """All that is asked about a held-out page."""
    tokens = ChatTokens()
    page = pages.sample(seed, "heldout")
    picture = Image.fromarray(page.picture)
    return [
        layout_sample(page, tokens),
        *(block_sample(page, picture, block, tokens, None) for block in read_blocks(page)),
    ]


class HeldOut:
    """The first ``count`` held-out pages, asked once. Forks for ``workers`` > 1: before CUDA is touched."""

    penalties = True
    """Whether answers are generated under the penalties of MinerU's client."""

    def __init__(self, count: int, tokens: ChatTokens, workers: int = 1) -> None:
        self.tokens = tokens
        cv2.setNumThreads(1)  # as in document_feed
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
            range(len(self.samples)),
            key=lambda i: (self.samples[i].step == "layout", len(self.samples[i].answer)),
        )
        for index in order:
            most = max(len(self.samples[i].patches) for i in [*waiting, index])
            if waiting and most * (len(waiting) + 1) > BUDGET:
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
        held = {
            name: torch.from_numpy(array).to(device)
            for name, array in chunk(samples, self.tokens, answers=False).arrays.items()
        }
        most = int(ROOM * max(len(sample.answer) for sample in samples)) + 8
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            states = patch_states(model, held["patches"], held["places"], held["lengths"])
            x = embedded(model, held["ids"], image_rows(model, states), held["source"], held["to"])
            got = generate(
                model, x, held["prompts"].long(), held["positions"], self.penalties * held["penalties"], most
            )
        return {index: self.tokens.decode(ids) for index, ids in zip(indices, got)}

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


def failures(held_out: HeldOut, answers: Sequence[str]) -> list[Failure]:
    """All samples with what was made of them, the worst first."""
    found = []
    for sample, got in zip(held_out.samples, answers, strict=True):
        expected = held_out.tokens.decode(sample.answer)
        share = 1 - scores.layout_f1([(expected, got)]) if sample.step == "layout" else scores.cer([(expected, got)])
        found.append(Failure(sample.step, sample.kind, share, unpatched(sample), expected, got))
    return sorted(found, key=lambda failure: -failure.error)


def write_failures(folder: Path, worst: Sequence[Failure], most: int) -> None:
    """What was read worst as PNG files, what was read in failures.txt, and the worst two of each step in sheet.webp."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "failures.txt").open("w", encoding="utf-8") as file:
        for rank, each in enumerate(worst[:most]):
            Image.fromarray(each.picture).save(folder / f"{rank:02d}.png")
            file.write(f"{rank:02d}.png {each.kind} error {each.error:.3f}\nexpected: {each.expected}\n")
            file.write(f"got:      {each.got}\n\n")
    (folder / "sheet.webp").write_bytes(sheet(chosen(worst, 2)))


def unpatched(sample: Sample) -> np.ndarray:
    """The picture of a sample, uint8 [height, width]."""
    rows, columns = sample.places.max(0) + 1
    grid = np.empty((rows, columns, 14, 14), np.uint8)
    grid[sample.places[:, 0], sample.places[:, 1]] = sample.patches.reshape(-1, 14, 14)
    return grid.transpose(0, 2, 1, 3).reshape(rows * 14, columns * 14)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--failures", type=Path, help="folder for pictures of what was read worst")
    parser.add_argument("--shown", type=int, default=24, help="how many of these")
    parser.add_argument("--no-penalties", action="store_true", help="greedy alone, to see what they cost; no figures")


def report(arguments: argparse.Namespace) -> None:
    held_out = HeldOut(arguments.pages, ChatTokens(), arguments.workers)
    held_out.penalties = not arguments.no_penalties
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Qwen2VLForConditionalGeneration.from_pretrained(arguments.checkpoint, dtype=torch.float32).to(device).eval()
    answers = held_out.answers(model, device)
    sys.path.append(str(Path(__file__).resolve().parents[2] / "loadtest"))
    from figures import emit

    command = f"python build/training/evaluate.py documents --pages {arguments.pages}"
    for name, value in figures(held_out.pairs(answers)).items():
        if arguments.no_penalties:
            print(name, value)
            continue
        emit(f"docs.{name}", value, "share", command, pages=arguments.pages, samples=len(held_out.samples))
    if arguments.failures:
        write_failures(arguments.failures, failures(held_out, answers), arguments.shown)
