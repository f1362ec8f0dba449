"""Train the document model on pages rendered meanwhile.

    python train_documents.py --state run --out checkpoint --minutes 25 --workers 15

Resumable: `--state` holds weights, their average, optimizers and progress, saved every `--save-minutes`; a run started
on it goes on with the very batch that would have come next. The learning rate follows the share of `--minutes` (or
`--steps`) that all runs on this state have used. `--begin CHECKPOINT` starts a new state with a checkpoint's weights,
everything else fresh, and all of the penalties from the first step on. Prints a line every `--report-seconds` and JSON
at the end.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parent.parent / "default_model"))

from document_batches import Plan
from document_feed import Batch, Feed
from document_network import LOOKING, DenseHead, embedded, image_rows, looking_loss, patch_states, text_states
from document_shape import build_model, save_model
from document_tokens import ChatTokens
from evaluate_documents import HeldOut
from muon import MatricesAndRest
from torch import nn
from transformers import Qwen2VLForConditionalGeneration

from pages import KINDS

LOSSES = {"read": 1.0, "letters": 0.5, "layout": 3.0, "blocks": 0.25, "looking": 1.0}
"""Their weights: of answers and patches of crops; of answers and patches of pages, and of where answers look there."""
PATCH_LOSSES = ("letters", "blocks")


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


class Trainer:
    """Model, dense head, their average, and optimizers."""

    def __init__(self, tokens: ChatTokens, device: torch.device, lr: float, compiled: bool = False) -> None:
        self.device, self.step, self.seconds, self._head_tokens = device, 0, 0.0, len(tokens.head)
        self.model = build_model().to(device).train()
        self.average = copy.deepcopy(self.model).eval().requires_grad_(False)
        config = self.model.config
        widths = config.vision_config.embed_dim, config.text_config.hidden_size
        self.head = DenseHead(*widths, tokens.size, len(KINDS)).to(device)
        body = (self.model.model.visual, self.model.model.language_model.layers)
        parameters = [*self.model.parameters(), *self.head.parameters()]
        self.optimizer = MatricesAndRest(body, parameters, lr, device)
        self._parts: dict[str, Any] = {"weights": self.model, "average": self.average, "head": self.head}
        self._parts |= {"muon": self.optimizer.muon, "adamw": self.optimizer.adamw}
        self._see, self._say = patch_states, text_states
        if compiled:
            self._see, self._say = (torch.compile(forward, dynamic=True) for forward in (patch_states, text_states))

    def losses(self, batch: Batch, strength: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Those of LOSSES that a chunk has, summed over its answers' tokens or its patches."""
        held = batch.tensors
        gain = random_gain(len(held["ids"]), self.device, generator)
        lengths = None if batch.full else held["lengths"]
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            states = self._see(self.model, held["patches"], held["places"], lengths, gain)
            x = embedded(self.model, held["ids"], image_rows(self.model, states), held["source"], held["to"])
            entering: list[torch.Tensor] = []
            hidden = self._say(self.model, x, held["positions"], entering=entering)
            logits = self.model.lm_head(hidden.flatten(0, 1)[held["asked"]]).float()
            if batch.layout:
                rows = entering[LOOKING[0]].flatten(0, 1)[held["to"]].view(len(states), -1, hidden.shape[-1])
                dense = self.head.layout_loss(states, rows, held)
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

    def train_step(self, batches: list[Batch], progress: float, strength: float = 0.0) -> torch.Tensor:
        """One update; returns the means of LOSSES. ``progress`` 0..1 sets the learning rate, ``strength`` 0..1 says how
        much of the penalties is taken off."""
        factor = min(1.0, (self.step + 1) / 100) * max(0.01, 0.5 + 0.5 * math.cos(math.pi * min(1.0, progress)))
        generator = torch.Generator().manual_seed(self.step)
        means = dict.fromkeys(LOSSES, torch.zeros((), device=self.device))
        for batch in batches:
            alike = [other for other in batches if other.layout == batch.layout]
            answered, patches = sum(other.answered for other in alike), sum(other.patch_count for other in alike)
            shares = {
                name: value / (patches if name in PATCH_LOSSES else answered)
                for name, value in self.losses(batch, strength, generator).items()
            }
            sum(LOSSES[name] * share for name, share in shares.items()).backward()
            means |= {name: means[name] + share.detach() for name, share in shares.items()}
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(factor)
        self.step += 1
        keep = min(0.998, self.step / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - keep)
        return torch.stack(list(means.values()))

    def begin_with(self, checkpoint: Path) -> None:
        """Takes a checkpoint's weights; the dense head and the optimizers stay fresh."""
        weights = Qwen2VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
        for model in (self.model, self.average):
            model.load_state_dict(weights)

    def save_state(self, folder: Path) -> None:
        """Files of at most 16 MiB each, whole or not at all; progress.json last."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in self._parts.items():
            torch.save({"step": self.step, "part": part.state_dict()}, folder / f"{name}.new")
        for name in self._parts:
            (folder / f"{name}.new").replace(folder / f"{name}.pt")
        (folder / "progress.json").write_text(json.dumps({"step": self.step, "seconds": self.seconds}))

    def load_state(self, folder: Path) -> None:
        """Goes on from `save_state`. Raises ValueError where its files are of different steps."""
        progress = json.loads((folder / "progress.json").read_text())
        self.step, self.seconds = progress["step"], progress["seconds"]
        stored = {name: torch.load(folder / f"{name}.pt", map_location=self.device) for name in self._parts}
        if {part["step"] for part in stored.values()} != {self.step}:
            raise ValueError(f"the state in {folder} is of several steps: it was cut off while it was written")
        for name, part in self._parts.items():
            part.load_state_dict(stored[name]["part"])


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains until the budget is used; returns the summary."""
    sys.setswitchinterval(5e-4)  # the feeding thread must not hold up kernel launches
    state, device = Path(arguments.state), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = ChatTokens()
    plan = replace(Plan(), **{name: value for name in PLANNED if (value := getattr(arguments, name)) is not None})
    progress_file = state / "progress.json"
    first = json.loads(progress_file.read_text())["step"] if progress_file.exists() else 0
    feed = Feed(plan, first, arguments.workers, device)
    held_out = HeldOut(arguments.held_out, tokens)
    trainer = Trainer(tokens, device, arguments.lr, arguments.compile)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans 15 ms for every new shape, and nearly every chunk is one
    if first:
        trainer.load_state(state)
    elif arguments.begin:
        trainer.begin_with(arguments.begin)
    began = reported = saved = checked = time.monotonic()
    earlier, sums = trainer.seconds, torch.zeros(len(LOSSES), device=device)
    steps, patches, characters, waited = 0, 0, 0, 0.0
    figures: dict[str, float] = {}
    try:
        while True:
            now = time.monotonic()
            trainer.seconds = earlier + now - began
            progress = trainer.step / arguments.steps if arguments.steps else trainer.seconds / 60 / arguments.minutes
            if progress >= 1 or (arguments.call_minutes and (now - began) / 60 >= arguments.call_minutes):
                break
            number, batches = feed.next()
            assert number == trainer.step, (number, trainer.step)
            waited += time.monotonic() - now
            sums += trainer.train_step(batches, progress, 1.0 if arguments.begin else penalty_strength(progress))
            steps += 1
            patches += sum(batch.patch_count for batch in batches)
            characters += sum(batch.answered for batch in batches)
            now = time.monotonic()
            if now - reported > arguments.report_seconds:
                told = " ".join(f"{name} {value:.4f}" for name, value in zip(LOSSES, (sums / steps).tolist()))
                spent = time.monotonic() - reported  # after the device caught up
                print(
                    f"{100 * progress:5.1f}% step {trainer.step} {told} {steps / spent:.2f} steps/s "
                    f"{patches / spent:.0f} patches/s {characters / spent:.0f} tokens/s, waited {waited:.1f} s",
                    flush=True,
                )
                reported, steps, patches, characters, waited = time.monotonic(), 0, 0, 0, 0.0
                sums.zero_()
            if now - saved > 60 * arguments.save_minutes:
                trainer.save_state(state)
                saved = time.monotonic()
            if now - checked > 60 * arguments.check_minutes:
                figures = held_out.figures(trainer.average, device)
                print(json.dumps({"step": trainer.step, **figures}), flush=True)
                checked = reported = time.monotonic()
                sums.zero_()
                steps = patches = characters = 0
    finally:
        feed.close()
    trainer.save_state(state)
    save_model(Path(arguments.out), trainer.average.state_dict())
    figures = held_out.figures(trainer.average, device)
    return {
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "gpu_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else 0,
        **figures,
    }


PLANNED = ("words", "lines", "patches", "chunk", "layouts", "repeat")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="checkpoint", help="checkpoint folder")
    parser.add_argument("--state", default="training-state", help="folder of the resumable state")
    parser.add_argument("--begin", type=Path, help="checkpoint whose weights a new state begins with")
    parser.add_argument("--minutes", type=float, default=25.0, help="wall-clock budget of all runs on this state")
    parser.add_argument("--call-minutes", type=float, default=0.0, help="this run stops here; a later one goes on")
    parser.add_argument("--steps", type=int, default=0, help="budget in steps instead of minutes")
    parser.add_argument("--workers", type=int, default=15, help="processes that render")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--report-seconds", type=float, default=15.0)
    parser.add_argument("--save-minutes", type=float, default=2.0)
    parser.add_argument("--check-minutes", type=float, default=4.0, help="held-out figures every so often")
    parser.add_argument("--held-out", type=int, default=8, help="held-out pages for these")
    parser.add_argument("--compile", action="store_true", help="fuse the forwards' small kernels")
    for name in PLANNED:
        parser.add_argument(f"--{name}", type=int, help=f"of document_batches.Plan ({getattr(Plan, name)})")
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(json.dumps(run(parse())))
