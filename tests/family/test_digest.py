"""Digests: equal inputs, equal names; any difference, another name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from tessera.family.digest import checkpoint_id, digest
from tessera.family.family import ImagePlan, View

PLAN = ImagePlan(768, 3, (3, 1, 2), (View(896, 448, (1, 448, 2, 448, 3), (0, 2, 1, 3, 4)),))


def test_every_part_counts() -> None:
    base = digest(b"picture", 0, PLAN, "settings", b"id")
    assert base.dtype == np.int64 and base.shape == (2,)
    assert np.array_equal(base, digest(b"picture", 0, PLAN, "settings", b"id"))
    others = [
        digest(b"picturf", 0, PLAN, "settings", b"id"),
        digest(b"picture", 1, PLAN, "settings", b"id"),
        digest(b"picture", 0, replace(PLAN, wire=(3, 2, 1)), "settings", b"id"),
        digest(b"picture", 0, replace(PLAN, views=(replace(PLAN.views[0], order=(2, 0, 1, 3, 4)),)), "settings", b"id"),
        digest(b"picture", 0, PLAN, "setting", b"sid"),
        digest(b"picture", 0, PLAN, "settings", b"iD"),
    ]
    assert len({tuple(value) for value in [base, *others]}) == 7


def write_checkpoint(folder: Path, weights: bytes) -> bytes:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    header = b'{"w": {}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)
    return checkpoint_id(folder)


def test_checkpoint_id_tells_fine_tunes_apart_and_nothing_else(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 4096
    first = write_checkpoint(tmp_path / "a", weights)
    assert write_checkpoint(tmp_path / "b", weights) == first
    # Fine-tuning changes weights everywhere: samples suffice, the header is the same.
    assert write_checkpoint(tmp_path / "c", weights[1:] + weights[:1]) != first
    assert write_checkpoint(tmp_path / "d", weights + b"\0") != first
