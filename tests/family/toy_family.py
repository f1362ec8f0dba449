"""A family unlike InternVL: pictures of any size, patches in groups of four, rotary positions of three axes.

Its layout, its class and its tower are registered by their names, as a real one is: see ``register``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.checkpoint.config import LAYOUTS, CheckpointConfig
from tessera.checkpoint.names import TEXT_NAMES
from tessera.checkpoint.text import read_text
from tessera.errors import InvalidRequest
from tessera.family.family import ImagePlan, ModelFamily, View
from tessera.family.registry import FAMILIES
from tessera.vision.towers.tower import TOWERS, Tower

PATCH, GROUP = 8, 16  # pixels: a patch's side, and that of two by two of them, which become one row
SECTIONS = [16, 24, 24]


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "ToyForConditionalGeneration", "toy_family:read")
    monkeypatch.setitem(FAMILIES, "toy", "toy_family:Toy")
    monkeypatch.setitem(TOWERS, "toy", "toy_family:ToyTower")


def as_toy(folder: Path) -> Path:
    """A folder of ``checkpoint_folders.write_hf_folder``, turned into the toy's."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["ToyForConditionalGeneration"], "model_type": "toy", "patch": PATCH}
    config["text_config"]["rope_scaling"] = {"type": "mrope", "mrope_section": SECTIONS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path, raw: dict[str, Any]) -> CheckpointConfig:
    text = read_text(folder, raw["text_config"])
    return CheckpointConfig(
        folder=folder,
        layout="toy",
        model_type="toy",
        vision={"patch": raw["patch"]},
        text=text,
        weight_names={"vision": ((r"visual\.(weight|bias)", r"\1"),), "text": TEXT_NAMES[text.architecture]},
        image_token_id=None,
        eos_token_ids=(),
        raw=raw,
        processor={},
    )


class Toy(ModelFamily):
    """``wire`` is (1, rows, columns) of groups. A row's positions are (base, base + row, base + column); the text goes
    on above the highest of them."""

    image_token = "<IMG_CONTEXT>"
    control_tokens = ("<img>", "<IMG_CONTEXT>", "</img>")
    image_token_id = None
    cost_unit = "groups of patches"
    max_cost = 60

    def __init__(self, config: CheckpointConfig) -> None:
        self.patch = config.vision["patch"]
        self.unit_shape = (2, 2, self.patch, self.patch, 3)

    def plan(self, width: int, height: int, policy: Any) -> ImagePlan:
        return self.plan_of((1, max(1, round(height / GROUP)), max(1, round(width / GROUP))))

    def plan_of(self, wire: tuple[int, int, int]) -> ImagePlan:
        frames, rows, columns = wire
        if frames != 1 or rows < 1 or columns < 1:
            raise InvalidRequest(f"{wire} is no grid of groups")
        split = (rows, 2, self.patch, columns, 2, self.patch, 3)
        view = View(columns * GROUP, rows * GROUP, split, (0, 3, 1, 4, 2, 5, 6))
        return ImagePlan(rows * columns, rows * columns, wire, (view,))

    def pieces(self, plan: ImagePlan) -> tuple[tuple[str, int], ...]:
        return ("<img>", 1), ("<IMG_CONTEXT>", plan.tokens), ("</img>", 1)

    def positions(self, input_length: int, spans: np.ndarray, plans: Sequence[ImagePlan]) -> np.ndarray:
        positions, above, done = np.zeros((3, input_length), np.int32), 0, 0
        for (start, length), plan in zip(spans.tolist(), plans, strict=True):
            above = self._text(positions[:, done:start], above)
            _, rows, columns = plan.wire
            grid = np.stack(np.broadcast_arrays(0, *np.indices((rows, columns)))).reshape(3, -1)
            positions[:, start : start + length] = above + grid
            above, done = above + max(rows, columns), start + length
        self._text(positions[:, done:], above)
        return positions

    @staticmethod
    def _text(out: np.ndarray, above: int) -> int:
        out[:] = above + np.arange(out.shape[1])
        return above + out.shape[1]


class ToyTower(Tower):
    """One linear layer, and to each row its whole picture's mean: a picture cannot be taken apart."""

    splits, max_cost = False, 60

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__()
        patch, hidden = config.vision["patch"], config.text.hidden_size
        self.unit_shape, self.row_shape = (2, 2, patch, patch, 3), (1, hidden)
        self.weight = torch.nn.Parameter(torch.zeros(hidden, 4 * patch * patch * 3))
        self.bias = torch.nn.Parameter(torch.zeros(hidden))

    def activation_bytes(self, cost: int, scores: bool = False) -> int:
        return 8 * cost * (self.weight.shape[1] + self.weight.shape[0])

    def forward(self, pixels: torch.Tensor, wires: Sequence[tuple[int, int, int]] = ()) -> torch.Tensor:
        rows = pixels.flatten(1).to(self.weight.dtype) / 255 @ self.weight.T + self.bias
        parts = rows.split([rows * columns for _, rows, columns in wires])
        return torch.cat([part + part.mean(0) for part in parts])
