"""What the model of rooms is trained on: tiles with branches of questions, and what lies on their patches."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from augment import Cutter, patch_targets
from checkpoints import ROOMS, fresh_model
from room_feed import Asking, Batch, RoomFeed
from room_network import DenseHead, image_rows, patch_states, text_states
from sequences import ChatTokens
from torch import nn
from trainer import Trainer

import scene
from scene.geometry import TILE

SHARE = {"hazard": 1.5, "count": 0.4, "colour": 0.12, "position": 0.25, "description": 3.0}


def class_names(world: Any, scenes: int = 400) -> list[str]:
    """Every class that has boxes in the first training scenes, sorted."""
    return sorted({box[0] for seed in range(scenes) for box in world.boxes(world.sample(seed, "train"))})


def question_share(hazards: Iterable[str]) -> Callable[[tuple[str, ...]], float]:
    """How often a group is asked.  Colours, places and counts have many groups; hazards' presence weighs most."""
    hazards = set(hazards)

    def share(group: tuple[str, ...]) -> float:
        if group[0] == "presence":
            return 4.0 if group[1] in hazards else 0.5
        return SHARE[group[0]]

    return share


class RoomTrainer(Trainer):
    """Its batches are of one number of tiles each."""

    CHECKPOINT = ROOMS
    LOSSES = {"answer": 1.0, "dense": 1.0}  # noqa: RUF012
    WARM_UP = 300
    WORLD: Any = scene

    def __init__(
        self,
        chat: ChatTokens,
        classes: int,
        tiles: int,
        device: torch.device,
        lr: float,
        compiled: bool = False,
        like: Path = ROOMS,
    ) -> None:
        model = fresh_model(like)
        # transformers starts the position table at zero; a small random start lets attention tell places apart at once.
        embeddings = model.model.vision_tower.embeddings
        for table in (embeddings.position_embeddings, embeddings.cls_token):
            nn.init.normal_(table, std=0.02)
        inside = (model.model.vision_tower, model.model.language_model.layers, model.model.multi_modal_projector)
        head = DenseHead(model.config.vision_config.hidden_size, classes)
        super().__init__(model, head, inside, device, lr, like)
        self.chat, self.classes, self.tiles = chat, classes, tiles
        self._cutter = Cutter(device)
        self._prefixes: dict[int, torch.Tensor] = {}
        self._see = torch.compile(self._look) if compiled else self._look

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(minutes=13.0)
        add = parser.add_argument
        add("--tiles", type=int, default=520, help="tiles per step")
        add("--length", type=int, default=254, help="places for questions and answers per picture")
        add("--questions", type=int, default=13, help="questions per picture and step")
        add("--store-gb", type=float, default=70.0, help="replay store on the device")
        add("--warm-pictures", type=int, default=3000, help="pictures rendered before the first step")

    @classmethod
    def open(cls, arguments: argparse.Namespace, first: int, device: torch.device) -> tuple[RoomTrainer, RoomFeed]:
        if arguments.tiles < 13:
            raise ValueError(f"--tiles must be at least 13 (12 and a thumbnail), got {arguments.tiles}")
        chat, classes = ChatTokens(), class_names(cls.WORLD)
        asking = Asking(chat, question_share(cls.WORLD.HAZARDS), arguments.questions, arguments.length)
        feed = RoomFeed(cls.WORLD, asking, classes, arguments, first, device)
        shape = (chat, len(classes), arguments.tiles)
        return cls(*shape, device, arguments.lr, arguments.compile, arguments.like), feed

    def _look(
        self, tiles: torch.Tensor, gain: torch.Tensor, covered: torch.Tensor, centred: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = patch_states(self.model, tiles, gain)
        return image_rows(self.model, states), self.head(states, covered, centred, valid)

    def _prefix(self, tiles: int) -> torch.Tensor:
        if tiles not in self._prefixes:
            self._prefixes[tiles] = torch.tensor(self.chat.prefix(tiles), device=self.device)
        return self._prefixes[tiles]

    def decay(self, progress: float) -> float:
        return min(1.0, (1 - progress) / 0.6)

    def units(self, batch: Batch) -> dict[str, int]:
        return {"pictures": len(batch.pictures)}

    def losses(self, batch: Batch, progress: float) -> Iterator[dict[str, torch.Tensor]]:
        count, per_picture = len(batch.pictures), batch.tiles
        used = count * per_picture
        held = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.tensors.items()}
        tiles = torch.empty((self.tiles, 3, TILE, TILE), dtype=torch.uint8, device=self.device)
        tiles[used:] = 128
        for i, (picture, plan) in enumerate(zip(batch.pictures, batch.layouts, strict=True)):
            self._cutter(batch.store.pixels(picture), plan, tiles[i * per_picture : (i + 1) * per_picture])
        boxes = held["boxes"].repeat_interleave(per_picture, 0, output_size=used)
        covered, centred = patch_targets(boxes, held["windows"], self.classes)
        gain = held["gains"].repeat_interleave(per_picture, 0, output_size=used)
        spare = self.tiles - used
        valid = torch.arange(self.tiles, device=self.device) < used
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            rows, dense = self._see(
                tiles,
                F.pad(gain, (0, 0) * 2 + (0, spare)),
                F.pad(covered, (0, 0) * 3 + (0, spare)),
                F.pad(centred, (0, 0) * 3 + (0, spare)),
                valid,
            )
            states = text_states(
                self.model, self._prefix(per_picture), rows[:used].reshape(count, -1, rows.shape[-1]),
                held["ids"], held["number"], held["position"], len(self.chat.head),
            )  # fmt: skip
            logits = self.model.lm_head(states.flatten(0, 1)[held["asked"]])
        each = F.cross_entropy(logits.float(), held["labels"], reduction="none")
        yield {"answer": (each * held["weights"]).sum() / held["weights"].sum(), "dense": dense}
