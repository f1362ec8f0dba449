"""What is the same in training either model: optimizers, the average of the weights, and the resumable state."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from checkpoints import save_model
from feed import Feed
from torch import nn


class Trainer:
    """Model, dense head, the model's average, Muon for the matrices inside of the layers and AdamW at half its rate for
    every other parameter. A model's own trainer says what is drawn and what its losses are."""

    CHECKPOINT: ClassVar[Path]
    """The tracked one, whose shape a new one has unless told otherwise."""
    LOSSES: ClassVar[Mapping[str, float]]
    """Their names and weights."""
    WARM_UP: ClassVar[int]
    """Steps until the full learning rate."""

    def __init__(
        self,
        model: nn.Module,
        head: nn.Module,
        inside: Iterable[nn.Module],
        device: torch.device,
        lr: float,
        like: Path,
    ) -> None:
        self.device, self.lr, self.step, self.seconds, self._like = device, lr, 0, 0.0, like
        self.model: Any = model.to(device).train()
        self.average = copy.deepcopy(model).eval().requires_grad_(False)
        self.head: Any = head.to(device)
        # Tables of vectors are no maps between them, and torch's Muon takes two dimensions only: the convolutions that
        # embed patches are AdamW's.
        named = [pair for part in inside for pair in part.named_parameters()]
        matrices = [p for name, p in named if name.endswith("weight") and p.ndim == 2]
        taken = {id(p) for p in matrices}
        rest = [p for p in (*model.parameters(), *head.parameters()) if id(p) not in taken]
        self.muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(
            rest, lr=lr / 2, betas=(0.9, 0.98), weight_decay=0.0, fused=device.type == "cuda"
        )
        self._parts = {"weights": self.model, "average": self.average, "head": self.head}
        self._parts |= {"muon": self.muon, "adamw": self.adamw}

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Options of this model's training alone."""

    @classmethod
    def open(cls, arguments: argparse.Namespace, first: int, device: torch.device) -> tuple[Trainer, Feed]:
        """A fresh trainer, and the batches from step ``first`` on."""
        raise NotImplementedError

    def decay(self, progress: float) -> float:
        """The share of the full learning rate at ``progress`` 0..1."""
        raise NotImplementedError

    def losses(self, batch: Any, progress: float) -> Iterator[dict[str, torch.Tensor]]:
        """Those of LOSSES that each part of a batch has; between two of them the gradients of the first are added."""
        raise NotImplementedError

    def units(self, batch: Any) -> dict[str, int]:
        """What a batch has how many of, for the report."""
        raise NotImplementedError

    def figures(self) -> dict[str, float]:
        """Of the average, on what is held out."""
        return {}

    def save_checkpoint(self, folder: Path) -> None:
        """The averaged weights as a checkpoint."""
        save_model(folder, self._like, self.average.state_dict())

    def train_step(self, batch: Any, progress: float) -> torch.Tensor:
        """One update at ``progress`` 0..1; returns the means of LOSSES. Waits for the device nowhere."""
        means = dict.fromkeys(self.LOSSES, torch.zeros((), device=self.device))
        for shares in self.losses(batch, progress):
            sum(self.LOSSES[name] * share for name, share in shares.items()).backward()  # type: ignore[union-attr]
            means |= {name: means[name] + share.detach() for name, share in shares.items()}
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = min(1.0, (self.step + 1) / self.WARM_UP) * max(0.01, self.decay(progress))
        for optimizer, rate in ((self.muon, self.lr), (self.adamw, self.lr / 2)):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        keep = min(0.998, self.step / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - keep)
        return torch.stack(list(means.values()))

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
