"""Digests: equal inputs, equal names; any difference, another name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from tessera.family.digest import checkpoint_id, digest
from tessera.family.family import ImagePlan

PLAN = ImagePlan(0, 3, 448, 448, 2, 1, True, 768)


def test_every_part_counts() -> None:
    base = digest(b"picture", PLAN, "settings", b"id")
    assert base.dtype == np.int64 and base.shape == (2,)
    assert np.array_equal(base, digest(b"picture", PLAN, "settings", b"id"))
    others = [
        digest(b"picturf", PLAN, "settings", b"id"),
        digest(b"picture", replace(PLAN, columns=1, rows=2), "settings", b"id"),
        digest(b"picture", PLAN, "setting", b"sid"),
        digest(b"picture", PLAN, "settings", b"iD"),
    ]
    assert len({tuple(value) for value in [base, *others]}) == 5


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
