"""Batches of training samples: each made from its number alone, so that a run that was killed goes on with the same.

A batch is a few chunks of samples of about one size, padded to the longest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from document_samples import TARGETS, Sample, block_sample, layout_sample
from document_tokens import IMAGE_PAD, PAD, ChatTokens
from feed import Feed, Item
from PIL import Image

import pages

SLOT_BYTES, SLOTS = 160 << 20, 2
PENALTIES = {"layout": (0.0, 0.0), "text": (1.0, 0.05), "equation": (1.0, 0.05), "table": (1.0, 0.005)}
"""Presence and frequency penalty of MinerU's client, by step."""


@dataclass(frozen=True)
class Plan:
    """What is in the batches. ``patches``: about how many of crops a batch has; ``chunk``: at most how many of them a
    chunk has, padding included; ``layouts``: whole pages a batch; ``longest``: tokens of an answer, above which a
    sample is left out; ``pruned``: the percentage of samples without equal groups."""

    patches: int = 160_000
    chunk: int = 64_000
    layouts: int = 6
    longest: int = 1000
    pruned: int = 0


@dataclass
class Chunk:
    """Samples side by side, padded; all arrays are [samples, ...] unless said otherwise.

    ``patches`` uint8 [.., patches, 196], ``places`` int16 [.., patches, 2], ``lengths`` int32, ``dense`` int16 [..,
    patches, 3]; ``ids`` int32 [.., tokens], ``positions`` int32 [3, .., tokens]; flat places of rows in rows and in
    ids: ``source``, ``to`` int64; flat places whose next token is an answer's: ``asked`` int64, with ``labels`` int64
    and the number of the answer's token ``nth`` int64; ``penalties`` float32 [.., 2]. Of layouts also ``blocks`` int16
    [.., blocks, 5], and ``line`` int16 [.., tokens]: the number of the block in whose line of the answer the next token
    stands, 0: in none.
    """

    layout: bool
    arrays: dict[str, np.ndarray]

    @property
    def answered(self) -> int:
        return len(self.arrays["labels"])


def prompt(sample: Sample, tokens: ChatTokens) -> list[int]:
    """The tokens before an answer."""
    return [*tokens.head, *[IMAGE_PAD] * (len(sample.patches) // 4), *tokens.tails[sample.step]]


def chunk(samples: Sequence[Sample], tokens: ChatTokens) -> Chunk:
    count, most, layout = len(samples), max(len(s.patches) for s in samples), samples[0].step == "layout"
    if any(len(sample.patches) < most for sample in samples):  # they take a mask, which wants multiples of 16
        most = -(-most // 16) * 16
    prompts = [prompt(sample, tokens) for sample in samples]
    width = max(len(before) + len(sample.answer) - 1 for before, sample in zip(prompts, samples))
    held = {
        "patches": np.full((count, most, samples[0].patches.shape[1]), 255, np.uint8),
        "places": np.zeros((count, most, 2), np.int16),
        "dense": np.zeros((count, most, TARGETS), np.int16),
        "lengths": np.array([len(sample.patches) for sample in samples], np.int32),
        "ids": np.full((count, width), PAD, np.int32),
        "positions": np.zeros((3, count, width), np.int32),
        "penalties": np.array([PENALTIES[sample.step] for sample in samples], np.float32),
    }
    if layout:
        most_blocks = max(0 if s.blocks is None else len(s.blocks) for s in samples)
        held["blocks"] = np.zeros((count, most_blocks, 5), np.int16)
        held["line"] = np.zeros((count, width), np.int16)
    flat: dict[str, list[np.ndarray]] = {name: [] for name in ("source", "to", "asked", "labels", "nth")}
    for index, sample in enumerate(samples):
        patches, rows, before, told = len(sample.patches), len(sample.patches) // 4, prompts[index], sample.answer[:-1]
        held["patches"][index, :patches], held["places"][index, :patches] = sample.patches, sample.places
        held["dense"][index, :patches] = sample.dense
        line = [*before, *told]
        held["ids"][index, : len(line)] = line
        held["positions"][:, index, : len(line)] = positions(len(tokens.head), sample, len(line))
        flat["source"].append(index * (most // 4) + np.arange(rows))
        flat["to"].append(index * width + len(tokens.head) + np.arange(rows))
        if sample.blocks is not None:
            held["blocks"][index, : len(sample.blocks)] = sample.blocks
            lines = 1 + np.cumsum(np.array(told) == tokens.newline)
            held["line"][index, len(before) - 1 : len(before) - 1 + len(lines)] = lines
        flat["asked"].append(index * width + len(before) - 1 + np.arange(len(sample.answer)))
        flat["labels"].append(np.array(sample.answer))
        flat["nth"].append(np.arange(len(sample.answer)))
    held |= {name: np.concatenate(parts).astype(np.int64) for name, parts in flat.items()}
    return Chunk(layout, held)


def positions(head: int, sample: Sample, length: int) -> np.ndarray:
    """int32 [3, length]: M-RoPE's, of one picture after ``head`` tokens."""
    rows = sample.places[::4] // 2
    found = np.empty((3, length), np.int32)
    found[:, :head] = np.arange(head)
    after = head + len(rows)
    found[0, head:after], found[1:, head:after] = head, head + rows.T
    found[:, after:] = head + max(sample.sides) + np.arange(length - after)
    return found


def chunks(samples: Sequence[Sample], tokens: ChatTokens, budget: int) -> Iterator[Chunk]:
    """Samples by size, as many in a chunk as ``budget`` patches hold with their padding; where it would be much, a
    chunk of a fair size ends early."""
    waiting: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: (sample.step == "layout", len(sample.patches))):
        size = len(sample.patches)
        if waiting and (
            (waiting[0].step == "layout") != (sample.step == "layout")
            or (len(waiting) + 1) * size > budget
            or (size > 1.6 * len(waiting[0].patches) and len(waiting) * size > budget // 6)
        ):
            yield chunk(waiting, tokens)
            waiting = []
        waiting.append(sample)
    if waiting:
        yield chunk(waiting, tokens)


def batch(number: int, plan: Plan, tokens: ChatTokens) -> list[Chunk]:
    """The chunks of batch ``number``."""
    dice = Random(f"batch/{number}")
    samples: list[Sample] = []
    layouts, used, page_number = 0, 0, 0
    while used < plan.patches or layouts < plan.layouts:
        # No two batches share a page: a batch has far fewer than 10,000.
        page = pages.sample(number * 10_000 + page_number)
        page_number += 1
        if layouts < plan.layouts:
            samples.append(layout_sample(page, tokens))
            layouts += 1
        if used >= plan.patches:
            continue
        picture = Image.fromarray(page.picture)
        for block in pages.read_blocks(page):
            if used >= plan.patches:
                break
            sample = block_sample(page, picture, block, tokens, dice)
            if len(sample.answer) <= plan.longest:
                samples.append(sample)
                used += len(sample.patches)
    samples = [sample.pruned() if dice.randrange(100) < plan.pruned else sample for sample in samples]
    return list(chunks(samples, tokens, plan.chunk))


class Batch:
    """A chunk's arrays as tensors on the device, copied."""

    def __init__(
        self, chunk: Chunk, patches: np.ndarray, device: torch.device, stream: torch.cuda.Stream | None = None
    ) -> None:
        self.layout, self.answered = chunk.layout, chunk.answered
        self.patch_count = int(chunk.arrays["lengths"].sum())
        self.full = len(chunk.arrays["lengths"]) * patches.shape[1] == self.patch_count
        self.longest_answer = int(chunk.arrays["nth"].max()) + 1
        held = {name: torch.from_numpy(array) for name, array in {**chunk.arrays, "patches": patches}.items()}
        with torch.cuda.stream(stream):  # beside the training's own, or a copy would wait for all that is queued there
            self.tensors = {name: array.to(device, copy=True) for name, array in held.items()}
        if stream is not None:
            for tensor in self.tensors.values():
                tensor.record_stream(torch.cuda.default_stream())


class DocumentFeed(Feed):
    """Batches from number ``first`` on, on the device."""

    def __init__(self, plan: Plan, first: int, workers: int, device: torch.device) -> None:
        tokens = ChatTokens()

        def make(number: int) -> Item:
            made = batch(number, plan, tokens)
            return made, [chunk.arrays.pop("patches") for chunk in made]

        super().__init__(make, first, workers, SLOTS, SLOT_BYTES)
        self._device = device

    def next(self) -> list[Batch]:
        stream = torch.cuda.Stream() if self._device.type == "cuda" else None
        with self.item() as found:
            assert found is not None
            batches = [Batch(chunk, patches, self._device, stream) for chunk, patches in zip(*found, strict=True)]
            if stream is not None:
                stream.synchronize()
        return batches
