"""The name of an image's embedding: equal bytes, cut and encoded alike, have equal digests."""

from __future__ import annotations

import json
from dataclasses import astuple
from hashlib import blake2b
from pathlib import Path

import numpy as np

from tessera.family.family import ImagePlan

SAMPLES = 16
SAMPLE_BYTES = 4096


def digest(encoded: bytes, kind: int, plan: ImagePlan, settings: str, checkpoint: bytes) -> np.ndarray:
    """blake2b-128 over encoded bytes, what PLAN says, the plan's views, preprocessing settings and checkpoint id, as
    int64 [2].

    Known before anything is decoded. Every part goes in with its length, so that none can imitate another.
    """
    hasher = blake2b(digest_size=16)
    cut = json.dumps([kind, plan.wire, [astuple(view) for view in plan.views]])
    for part in (encoded, cut.encode(), settings.encode(), checkpoint):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return np.frombuffer(hasher.digest(), dtype="<i8").astype(np.int64)


def checkpoint_id(folder: Path) -> bytes:
    """16 bytes that differ between checkpoints: config.json and of each safetensors file name, size, header, samples.

    Weights are sampled (16 blocks a file), not read whole: two fine-tunes have equal headers. No modification times.
    """
    hasher = blake2b(digest_size=16)
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    for path in files:
        size = path.stat().st_size
        hasher.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            header = min(int.from_bytes(file.read(8), "little") + 8, size) if path.suffix != ".json" else size
            file.seek(0)
            hasher.update(file.read(header))
            for index in range(SAMPLES):
                file.seek(header + (size - header) * index // SAMPLES)
                hasher.update(file.read(SAMPLE_BYTES))
    return hasher.digest()
