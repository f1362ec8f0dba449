"""What the document model is trained on: crops and whole pages, what is written there and where its blocks are.

A run that goes on begins with the very batch that would have come next. `--begin CHECKPOINT` starts a new state with a
checkpoint's weights, everything else fresh, and all of the penalties from the first step on.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from checkpoints import DOCUMENTS, fresh_model
from document_batches import Batch, DocumentFeed, Plan
from document_network import LOOKING, DenseHead, embedded, image_rows, looking_loss, patch_states, text_states
from document_tokens import ChatTokens
from evaluate import HeldOut
from trainer import Trainer
from transformers import Qwen2VLForConditionalGeneration

from pages import KINDS

PATCH_LOSSES = ("letters", "blocks")
PLANNED = ("patches", "chunk", "layouts", "pruned")


def random_gain(count: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """float32 [count, 2, 3]: a quarter of the pictures get coloured ink and paper; a few are light on dark."""
    draw = torch.rand((count, 2, 3), generator=generator)
    coloured = (torch.rand((count, 1), generator=generator) < 0.25).float()
    dark, light = 0.4 * draw[:, 0] * coloured, 1 - 0.25 * draw[:, 1] * coloured
    swapped = torch.rand((count, 1), generator=generator) < 0.04
    dark, light = torch.where(swapped, light, dark), torch.where(swapped, dark, light)
    return torch.stack((light - dark, dark), 1).to(device, non_blocking=True)


def penalised(logits: torch.Tensor, batch: dict[str, torch.Tensor], longest: int, strength: float) -> torch.Tensor:
    """Logits [n, vocabulary] of the asked places less what MinerU's client has taken off tokens answered before.

    So trained, the model's certainty is larger than the penalties, which grow with an answer's length.
    """
    samples = batch["asked"] // batch["ids"].shape[1]
    answered = logits.new_zeros(len(batch["penalties"]), longest + 1, logits.shape[1])
    answered[samples, batch["nth"] + 1, batch["labels"]] = 1
    before = answered.cumsum_(1)[samples, batch["nth"]]
    once, each = (strength * batch["penalties"][samples]).split(1, 1)
    return logits - once * (before > 0) - each * before


def penalty_strength(progress: float) -> float:
    """Of a model that begins with nothing: none at first, all of it from the middle of the run on."""
    return min(1.0, max(0.0, (progress - 0.35) / 0.2))


class DocumentTrainer(Trainer):
    """Its batches are a few chunks each. LOSSES are of answers and patches of crops, of answers and patches of pages,
    and of where answers look there."""

    CHECKPOINT = DOCUMENTS
    LOSSES = {"read": 1.0, "letters": 0.5, "layout": 3.0, "blocks": 0.25, "looking": 1.0}  # noqa: RUF012
    WARM_UP = 100

    def __init__(
        self, tokens: ChatTokens, device: torch.device, lr: float, compiled: bool = False, like: Path = DOCUMENTS
    ) -> None:
        model = fresh_model(like)
        widths = model.config.vision_config.embed_dim, model.config.text_config.hidden_size
        inside = (model.model.visual, model.model.language_model.layers)
        super().__init__(model, DenseHead(*widths, tokens.size, len(KINDS)), inside, device, lr, like)
        self._head_tokens, self.all_penalties = len(tokens.head), False
        self.held_out = HeldOut(0, tokens)
        self._see, self._say = patch_states, text_states
        if compiled:
            self._see, self._say = (torch.compile(forward, dynamic=True) for forward in (patch_states, text_states))

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--begin", type=Path, help="checkpoint whose weights a new state begins with")
        parser.add_argument("--held-out", type=int, default=8, help="held-out pages for the figures")
        for name in PLANNED:
            parser.add_argument(f"--{name}", type=int, help=f"of document_batches.Plan ({getattr(Plan, name)})")

    @classmethod
    def open(
        cls, arguments: argparse.Namespace, first: int, device: torch.device
    ) -> tuple[DocumentTrainer, DocumentFeed]:
        tokens = ChatTokens()
        given = {name: value for name in PLANNED if (value := getattr(arguments, name)) is not None}
        feed = DocumentFeed(replace(Plan(), **given), first, arguments.workers, device)
        trainer = cls(tokens, device, arguments.lr, arguments.compile, arguments.like)
        trainer.held_out, trainer.all_penalties = HeldOut(arguments.held_out, tokens), bool(arguments.begin)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans 15 ms for every new shape, and nearly every chunk is one
        if arguments.begin and not first:
            trainer.begin_with(arguments.begin)
        return trainer, feed

    def decay(self, progress: float) -> float:
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, progress))

    def units(self, batch: list[Batch]) -> dict[str, int]:
        return {"patches": sum(chunk.patch_count for chunk in batch), "tokens": sum(chunk.answered for chunk in batch)}

    def figures(self) -> dict[str, float]:
        return self.held_out.figures(self.average, self.device)

    def losses(self, batch: list[Batch], progress: float) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.step)
        strength = 1.0 if self.all_penalties else penalty_strength(progress)
        for chunk in batch:
            alike = [other for other in batch if other.layout == chunk.layout]
            answered, patches = sum(other.answered for other in alike), sum(other.patch_count for other in alike)
            yield {
                name: value / (patches if name in PATCH_LOSSES else answered)
                for name, value in self.chunk_losses(chunk, strength, generator).items()
            }

    def chunk_losses(self, batch: Batch, strength: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Those of LOSSES that a chunk has, summed over its answers' tokens or its patches."""
        held = batch.tensors
        gain = random_gain(len(held["ids"]), self.device, generator)
        lengths = None if batch.full else held["lengths"]
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            states = self._see(self.model, held["patches"], held["places"], lengths, gain)
            x = embedded(self.model, held["ids"], image_rows(self.model, states), held["source"], held["to"])
            entering: list[torch.Tensor] = []
            hidden = self._say(self.model, x, held["positions"], entering)
            logits = self.model.lm_head(hidden.flatten(0, 1)[held["asked"]]).float()
            if batch.layout:
                looked_at = entering[LOOKING[0]].flatten(0, 1)
                rows = looked_at.new_zeros(states[..., 0].numel() // 4, hidden.shape[-1])
                rows[held["source"]] = looked_at[held["to"]]
                dense = self.head.layout_loss(states, rows.view(len(states), -1, hidden.shape[-1]), held)
                looking = looking_loss(self.model, entering, held, self._head_tokens)
            else:
                found = self.head.character(states).float()
        if strength > 0 and not batch.layout:
            logits = penalised(logits, held, batch.longest_answer, strength)
        answers = F.cross_entropy(logits, held["labels"], reduction="sum")
        if batch.layout:
            return {"layout": answers, "blocks": dense, "looking": looking}
        goal = held["dense"].long()
        real = torch.arange(goal.shape[1], device=self.device) < held["lengths"][:, None]
        # That there is no character in a patch counts; that there is none before another does not.
        told = torch.stack((real, goal[..., 1] > 0, goal[..., 2] > 0), -1)
        goal = torch.where(told, goal, -100)
        dense = F.cross_entropy(found.unflatten(-1, (3, -1)).flatten(0, 2), goal.flatten(), reduction="sum")
        return {"read": answers, "letters": dense}

    def begin_with(self, checkpoint: Path) -> None:
        """Takes a checkpoint's weights; the dense head and the optimizers stay fresh."""
        weights = Qwen2VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
        for model in (self.model, self.average):
            model.load_state_dict(weights)
