"""Batching around a runner: pictures of many requests in, their rows out.

Tiles of all items are lined up whatever request they belong to, cut into forwards of at most ``infer_batch_size``
tiles, and the rows put back together by picture. A picture seen before (same digest, same plan) is not computed again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig, read_config
from tessera.errors import ConfigError, InvalidRequest
from tessera.vision.embedding_cache import EmbeddingCache

KIND_TILES = 0
_PLAN_LENGTH = 4  # kind, t, h, w


@dataclass(frozen=True)
class VisionSettings:
    """How the vision stage runs.

    ``threads`` inside one forward; ``onnx_path`` is the exported file (without one, the graph is written from
    the checkpoint at start); ``cache_bytes`` bounds the embeddings kept of pictures seen before.
    """

    runner: str = "onnx"
    infer_batch_size: int = 4
    threads: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    onnx_path: Path | None = None
    random_weights: bool = False
    cache_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        if self.runner not in ("onnx", "torch"):
            raise ConfigError(f"vision runner {self.runner!r} is not known; known are onnx, torch")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"vision dtype {self.dtype!r} is not known; known are float32, bfloat16, float16")
        if self.runner == "onnx" and (self.dtype, self.device) != ("float32", "cpu"):
            raise ConfigError("the onnx runner computes in float32 on the CPU; use runner torch for anything else")
        if self.infer_batch_size < 1 or self.threads < 1 or self.cache_bytes < 0:
            raise ConfigError(
                "the vision stage needs infer_batch_size >= 1, threads >= 1 and cache_bytes >= 0, not "
                f"{self.infer_batch_size}, {self.threads} and {self.cache_bytes}"
            )


@dataclass(frozen=True)
class VisionItem:
    """One request's pictures: uint8 pixels (flat, all pictures in order), int32 plan [4k], int64 digest [2k]."""

    pixels: np.ndarray
    plan: np.ndarray
    digest: np.ndarray


class Runner(Protocol):
    """uint8 [n, side, side, 3] -> rows [n, tokens per tile, hidden]."""

    def run(self, tiles: np.ndarray) -> torch.Tensor: ...


@dataclass
class _Picture:
    key: Hashable
    tiles: np.ndarray  # uint8 [t, side, side, 3]
    rows: torch.Tensor | None = None


class VisionEncoder:
    """Turns items into embeddings; used by one thread at a time."""

    def __init__(self, runner: Runner, tile_side: int, infer_batch_size: int = 4, cache_bytes: int = 0) -> None:
        self.runner = runner
        self.tile_side = tile_side
        self.infer_batch_size = infer_batch_size
        self.cache = EmbeddingCache(cache_bytes)

    @classmethod
    def from_checkpoint(
        cls, folder: Path | str | CheckpointConfig, settings: VisionSettings | None = None
    ) -> VisionEncoder:
        """Load the tower of a checkpoint. Raises CheckpointError or ConfigError saying what does not fit."""
        settings = settings or VisionSettings()
        config = folder if isinstance(folder, CheckpointConfig) else read_config(folder)
        return cls(
            _make_runner(config, settings),
            config.vision.image_size,
            settings.infer_batch_size,
            settings.cache_bytes,
        )

    def encode(self, items: Sequence[VisionItem]) -> list[torch.Tensor | None]:
        """Rows [tokens, hidden] of each item (of all its pictures, in order); None for an item without pictures.

        Rows may be shared with the cache: do not change them in place. Raises InvalidRequest when an item's
        pixels, plan and digest do not agree.
        """
        rows = dict(self.encode_each(items))
        return [rows[index] for index in range(len(items))]

    def encode_each(self, items: Sequence[VisionItem]) -> Iterator[tuple[int, torch.Tensor | None]]:
        """The same, as (index of the item, rows), each as soon as the forwards that it needs are done."""
        waiting = dict(enumerate([self._pictures(item) for item in items]))
        known: dict[Hashable, _Picture] = {}
        for picture in (picture for group in waiting.values() for picture in group):
            if picture.key not in known:
                known[picture.key] = picture
                picture.rows = self.cache.get(picture.key)
        unknown = [picture for picture in known.values() if picture.rows is None]
        for _ in chain([None], self._forwards(unknown)):
            for index, group in list(waiting.items()):
                rows = [known[picture.key].rows for picture in group]
                done = [tensor for tensor in rows if tensor is not None]
                if len(done) == len(rows):
                    del waiting[index]
                    yield index, (torch.cat(done) if len(done) > 1 else done[0] if done else None)

    def checked(self, item: VisionItem) -> VisionItem:
        """The item itself. Raises InvalidRequest when its pixels, plan and digest do not agree."""
        self._pictures(item)
        return item

    def _forwards(self, pictures: list[_Picture]) -> Iterator[None]:
        """Line up all tiles and run them; stops after each forward, with the rows of finished pictures filled in."""
        parts: dict[Hashable, list[torch.Tensor]] = {picture.key: [] for picture in pictures}
        for batch in _batches(pictures, self.infer_batch_size):
            tiles = [picture.tiles[rows] for picture, rows in batch]
            output = self.runner.run(tiles[0] if len(tiles) == 1 else np.concatenate(tiles))
            pieces = output.split([len(piece) for piece in tiles])
            for (picture, rows), piece in zip(batch, pieces, strict=True):
                parts[picture.key].append(piece.flatten(0, 1))
                if rows.stop == len(picture.tiles):
                    whole = parts.pop(picture.key)
                    picture.rows = torch.cat(whole) if len(whole) > 1 else whole[0]
                    self.cache.put(picture.key, picture.rows)
            yield

    def _pictures(self, item: VisionItem) -> list[_Picture]:
        if item.plan.size % _PLAN_LENGTH:
            raise InvalidRequest(f"PLAN has {item.plan.size} values; it needs {_PLAN_LENGTH} for each picture")
        plans = [tuple(int(value) for value in row) for row in item.plan.reshape(-1, _PLAN_LENGTH)]
        if item.digest.size != 2 * len(plans):
            raise InvalidRequest(f"DIGEST has {item.digest.size} values for {len(plans)} pictures; it needs 2 each")
        digests = [tuple(int(value) for value in row) for row in item.digest.reshape(-1, 2)]
        pictures, start = [], 0
        for number, (plan, digest) in enumerate(zip(plans, digests, strict=True)):
            kind, tiles, height, width = plan
            if kind != KIND_TILES or tiles < 1 or height != self.tile_side or width != self.tile_side:
                raise InvalidRequest(
                    f"picture {number}: this model takes kind {KIND_TILES} with one or more tiles of "
                    f"{self.tile_side}x{self.tile_side} pixels, not kind {kind} with {tiles} of {width}x{height}"
                )
            end = start + tiles * height * width * 3
            pixels = item.pixels[start:end]
            start = end
            if len(pixels) == tiles * height * width * 3:
                pictures.append(_Picture((digest, plan), pixels.reshape(tiles, height, width, 3)))
        if start != item.pixels.size:
            raise InvalidRequest(f"PIXELS has {item.pixels.size} bytes; the plan needs {start}")
        return pictures


def _batches(pictures: list[_Picture], size: int) -> Iterator[list[tuple[_Picture, slice]]]:
    """Cut the line of all tiles into batches of ``size`` (the last may be smaller): (picture, which of its tiles)."""
    batch: list[tuple[_Picture, slice]] = []
    room = size
    for picture in pictures:
        start = 0
        while start < len(picture.tiles):
            stop = min(start + room, len(picture.tiles))
            batch.append((picture, slice(start, stop)))
            room -= stop - start
            start = stop
            if room == 0:
                yield batch
                batch, room = [], size
    if batch:
        yield batch


def _make_runner(config: CheckpointConfig, settings: VisionSettings) -> Runner:
    if settings.runner == "onnx":
        from tessera.vision.onnx_runner import OnnxRunner

        return OnnxRunner.from_checkpoint(config, settings.onnx_path, settings.threads, settings.random_weights)
    from tessera.vision.torch_runner import TorchRunner

    return TorchRunner.from_checkpoint(
        config, settings.dtype, settings.threads, settings.device, settings.random_weights
    )
