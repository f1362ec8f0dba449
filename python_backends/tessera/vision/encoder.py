"""Batching around a runner: pictures of many requests in, their rows out.

Tiles of all items are lined up whatever request they belong to, cut into forwards of at most ``infer_batch_size``
tiles, and the rows put back together by picture. A picture seen before (same digest, same plan) is not computed again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch

from tessera.checkpoint.config import CheckpointConfig, read_config
from tessera.errors import InvalidRequest
from tessera.vision.embedding_cache import EmbeddingCache
from tessera.vision.gpu_pictures import TileDecoder, make_decoder
from tessera.vision.pictures import Picture, VisionItem, joined, pictures_of
from tessera.vision.runner import Runner, make_runner
from tessera.vision.settings import VisionSettings


class VisionEncoder:
    """Turns items into embeddings; used by one thread at a time."""

    def __init__(
        self,
        runner: Runner,
        tile_side: int,
        infer_batch_size: int = 4,
        cache_bytes: int = 0,
        decoder: TileDecoder | None = None,
    ) -> None:
        self.runner = runner
        self.decoder = decoder
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
            make_runner(config, settings),
            config.vision.image_size,
            settings.infer_batch_size,
            settings.cache_bytes,
            make_decoder(settings.picture_decoder, settings.device),
        )

    def encode(self, items: Sequence[VisionItem]) -> list[torch.Tensor | None]:
        """Rows [tokens, hidden] of each item (of all its pictures, in order); None for an item without pictures.

        Rows may be shared with the cache: do not change them in place. Raises InvalidRequest when an item's
        pixels, plan and digest do not agree.
        """
        found = dict(self.encode_each(items))
        rows = []
        for index in range(len(items)):
            row = found[index]
            if isinstance(row, InvalidRequest):
                raise row
            rows.append(row)
        return rows

    def encode_each(self, items: Sequence[VisionItem]) -> Iterator[tuple[int, torch.Tensor | InvalidRequest | None]]:
        """The same, as (index of the item, rows), each as soon as the forwards that it needs are done.

        In place of the rows of an item with an encoded picture that cannot be decoded: the error that says so.
        """
        waiting = dict(enumerate([self._pictures(item) for item in items]))
        known: dict[Hashable, Picture] = {}
        for picture in (picture for group in waiting.values() for picture in group):
            if picture.key not in known:
                known[picture.key] = picture
                picture.rows = self.cache.get(picture.key)
        unknown = [picture for picture in known.values() if picture.rows is None]
        for _ in chain([None], self._forwards(unknown)):
            for index, group in list(waiting.items()):
                errors = [error for picture in group if (error := known[picture.key].error)]
                if errors:
                    del waiting[index]
                    yield index, errors[0]
                    continue
                rows = [known[picture.key].rows for picture in group]
                done = [tensor for tensor in rows if tensor is not None]
                if len(done) == len(rows):
                    del waiting[index]
                    yield index, (torch.cat(done) if len(done) > 1 else done[0] if done else None)

    def checked(self, item: VisionItem) -> VisionItem:
        """The item itself. Raises InvalidRequest when its pixels, plan and digest do not agree."""
        self._pictures(item)
        return item

    def _pictures(self, item: VisionItem) -> list[Picture]:
        return pictures_of(item, self.tile_side, encoded=self.decoder is not None)

    def _forwards(self, pictures: list[Picture]) -> Iterator[None]:
        """Line up all tiles and run them; stops after each forward, with the rows of finished pictures filled in."""
        parts: dict[Hashable, list[torch.Tensor]] = {picture.key: [] for picture in pictures}
        for batch in _batches(self._decoded(pictures), self.infer_batch_size):
            tiles = [picture.part(rows) for picture, rows in batch]
            output = self.runner.run(joined(tiles))
            pieces = output.split([len(piece) for piece in tiles])
            for (picture, rows), piece in zip(batch, pieces, strict=True):
                parts[picture.key].append(piece.flatten(0, 1))
                if rows.stop == picture.count:
                    whole = parts.pop(picture.key)
                    picture.rows = torch.cat(whole) if len(whole) > 1 else whole[0]
                    self.cache.put(picture.key, picture.rows)
                    picture.tiles = None
            yield
        yield  # pictures after the last forward may have turned out undecodable

    def _decoded(self, pictures: list[Picture]) -> Iterator[Picture]:
        """Each picture with its tiles, which an encoded one gets when its first forward is put together."""
        for picture in pictures:
            if picture.encoded is None or (self.decoder and picture.decode(self.decoder)):
                yield picture


def _batches(pictures: Iterable[Picture], size: int) -> Iterator[list[tuple[Picture, slice]]]:
    """Cut the line of all tiles into batches of ``size`` (the last may be smaller): (picture, which of its tiles)."""
    batch: list[tuple[Picture, slice]] = []
    room = size
    for picture in pictures:
        start = 0
        while start < picture.count:
            stop = min(start + room, picture.count)
            batch.append((picture, slice(start, stop)))
            room -= stop - start
            start = stop
            if room == 0:
                yield batch
                batch, room = [], size
    if batch:
        yield batch
