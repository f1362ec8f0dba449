"""The name of an image's embedding: equal bytes, cut and encoded alike, have equal digests."""

from __future__ import annotations

import json
from dataclasses import astuple
from hashlib import blake2b
from pathlib import Path

import numpy as np

from tessera.family.family import ImagePlan

WHOLE = 64 << 20  # bytes of a file up to which it is read whole
SAMPLES = 16
SAMPLE_BYTES = 4096
READ_BY_THE_SERVER = (".json", ".jinja", ".model", ".py", ".txt", ".safetensors")


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
    """16 bytes that differ between checkpoints: name, size and contents of all files in the folder that are read.

    Large files of weights are sampled: their header, 16 blocks, and a block of every tensor, for a fine-tune may change
    no more than a few of these. No modification times.
    """
    hasher = blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.suffix in READ_BY_THE_SERVER and path.is_file()):
        size = path.stat().st_size
        hasher.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= WHOLE:
                hasher.update(file.read())
                continue
            header = min(int.from_bytes(file.read(8), "little") + 8, size)
            file.seek(0)
            text = file.read(header)
            hasher.update(text)
            places = [header + (size - header) * index // SAMPLES for index in range(SAMPLES)]
            for place in places + [header + middle for middle in _middles(text[8:])]:
                file.seek(place)
                hasher.update(file.read(SAMPLE_BYTES))
    return hasher.digest()


def _middles(header: bytes) -> list[int]:
    """Where the middle of each tensor is, in bytes after the header; none where this is no header of safetensors."""
    try:
        spans = [about["data_offsets"] for name, about in json.loads(header).items() if name != "__metadata__"]
        return sorted((begin + end) // 2 for begin, end in spans)
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
