"""Batching around a runner: pictures of many requests in, their rows out.

Tiles of all items are lined up whatever request they belong to, cut into forwards of at most ``infer_batch_size``
tiles, and the rows put back together by picture. A picture seen before (same digest, same plan) is not computed again.
Items go out in groups that are cut by pictures, wherever the forwards were cut.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from tessera.checkpoint.config import CheckpointConfig, read_config
from tessera.errors import InvalidRequest
from tessera.vision.embedding_cache import EmbeddingCache
from tessera.vision.gpu_pictures import TileDecoder, make_decoder
from tessera.vision.lane import AHEAD, Lane, Mark
from tessera.vision.memory import COPIES_OF_ROWS, RowBudget, row_budget
from tessera.vision.pictures import Picture, VisionItem, joined, pictures_of
from tessera.vision.runner import Runner, load_runner
from tessera.vision.settings import VisionSettings

Waiting = dict[int, list[Picture]]  # an item's index -> its pictures
# An item's index -> its rows, or why it has none.
Rows = dict[int, "torch.Tensor | Exception | None"]


@dataclass(frozen=True)
class Encoded:
    """An item's rows, perhaps still being computed: ``with encoded as rows`` waits for them, and frees them at its end.

    Each must be entered once, or its bytes stay counted. ``rows`` is [tokens, hidden] of all the item's ``pictures`` in
    order, None without any; items with the same picture may share them: do not change them in place. Entering
    raises what kept a picture from being decoded, InvalidRequest if the file did.
    """

    index: int
    pictures: int
    _tiles: int
    _rows: torch.Tensor | Exception | None
    _mark: Mark
    _budget: RowBudget

    def __enter__(self) -> torch.Tensor | None:
        try:
            if isinstance(self._rows, Exception):
                raise self._rows
            if self._rows is not None:
                self._mark.wait(self._rows)
        except BaseException:
            self.__exit__()
            raise
        return self._rows

    def __exit__(self, *error: object) -> None:
        self._budget.give_back(self._tiles)


class VisionEncoder:
    """Turns items into embeddings; used by one thread at a time.

    Args:
        runner: computes a forward.
        tile_side: of the square tiles, in pixels.
        infer_batch_size: tiles of a forward at most.
        cache: of the rows of pictures seen before; without one all are computed.
        lane: where the runner's device works.
        budget: for rows on their way out; without one there is no limit.
        decoder: of pictures that travel encoded; without one they are refused.
        decode_bytes: what decoding one picture may take.
    """

    def __init__(
        self,
        runner: Runner,
        tile_side: int,
        infer_batch_size: int = 4,
        cache: EmbeddingCache | None = None,
        lane: Lane | None = None,
        budget: RowBudget | None = None,
        decoder: TileDecoder | None = None,
        decode_bytes: int = 2**31,
    ) -> None:
        self.runner = runner
        self.decoder = decoder
        self.decode_bytes = decode_bytes
        self.tile_side = tile_side
        self.infer_batch_size = infer_batch_size
        self.cache = cache or EmbeddingCache()
        self.lane = lane or Lane()
        self.budget = budget or RowBudget(bytes_per_tile=0)

    @classmethod
    def from_checkpoint(
        cls, folder: Path | str | CheckpointConfig, settings: VisionSettings | None = None
    ) -> VisionEncoder:
        """Load the tower of a checkpoint.

        Raises CheckpointError or ConfigError saying what does not fit, the settings' memory included.
        """
        settings = settings or VisionSettings()
        config = folder if isinstance(folder, CheckpointConfig) else read_config(folder)
        runner, kept = load_runner(config, settings)
        size, batch = config.vision.image_size, settings.infer_batch_size
        parts = {
            "weights": kept,
            "activations": runner.activation_bytes(batch),
            "pixels": (1 + AHEAD) * batch * size * size * config.vision.num_channels,
            "cache": settings.cache_bytes,
        }
        decoder = make_decoder(settings.picture_decoder, settings.device)
        if decoder is not None:
            parts["decoding"] = settings.decode_bytes
        hidden, dtype = config.text.hidden_size, getattr(torch, settings.dtype)
        per_tile = COPIES_OF_ROWS * config.vision.tokens_per_tile * hidden * dtype.itemsize
        budget = row_budget(settings.memory_bytes, parts, per_tile, batch)
        cache = EmbeddingCache(settings.cache_bytes, hidden, dtype, settings.device)
        lane = Lane(settings.device)
        return cls(runner, size, batch, cache, lane, budget, decoder, settings.decode_bytes)

    def encode(self, items: Sequence[VisionItem]) -> list[torch.Tensor | None]:
        """Rows [tokens, hidden] of each item (of all its pictures, in order); None for an item without pictures.

        Items with the same picture may share rows: do not change them in place. Raises InvalidRequest when an item's
        pixels, plan and digest do not agree, or a picture cannot be decoded.
        """
        found: dict[int, torch.Tensor | None] = {}
        for group in self.encode_in_groups(items):
            for encoded in group:
                with encoded as rows:
                    found[encoded.index] = rows
        return [found[index] for index in range(len(items))]

    def encode_in_groups(self, items: Sequence[VisionItem], size: int = 1) -> Iterator[list[Encoded]]:
        """The same one by one, each as soon as the forwards that it needs are launched, in groups of ``size`` pictures.

        Where rows would not fit the budget together, items are worked off in waves: the next begins when enough of
        what was given out has been entered and left. If a forward fails, what is done is given out before it raises.
        Raises InvalidRequest for an item that :meth:`checked` would refuse.
        """
        pictures = [self._pictures(item) for item in items]
        tiles = [_tiles(group) for group in pictures]
        for wave in self.budget.waves(tiles):
            waiting = {index: pictures[index] for index in wave}
            for index in wave:  # their rows must be gone when their bytes are given to the next wave
                pictures[index] = []
            self.budget.reserve(sum(tiles[index] for index in wave))
            yield from in_groups(self._encode(waiting), size)

    def checked(self, item: VisionItem) -> VisionItem:
        """The item itself. Raises InvalidRequest when its pixels, plan and digest do not agree or it can never fit."""
        self._pictures(item)
        return item

    def _pictures(self, item: VisionItem) -> list[Picture]:
        pictures = pictures_of(item, self.tile_side, encoded=self.decoder is not None)
        self.budget.check(_tiles(pictures))
        for picture in pictures:
            if picture.encoded is not None and picture.encoded.peak_bytes > self.decode_bytes:
                raise InvalidRequest(
                    f"a picture of {picture.size_text} takes {picture.encoded.peak_bytes} bytes to decode on the GPU, "
                    f"and the vision stage keeps {self.decode_bytes} for that: raise vision_encoder.decode_bytes, send "
                    "a smaller picture, or set preprocess.gpu_pixels to 0"
                )
        return pictures

    def _encode(self, waiting: Waiting) -> Iterator[Encoded]:
        """Takes items, whose rows are reserved, out of ``waiting`` as they are done."""
        try:
            known: dict[Hashable, Picture] = {}
            for picture in chain.from_iterable(waiting.values()):
                known.setdefault(picture.key, picture)
            yield from self._take(waiting, *self.lane.launch(partial(self._recall, waiting, known)))
            unknown = [picture for picture in known.values() if picture.rows is None]
            parts: dict[Hashable, list[torch.Tensor]] = {picture.key: [] for picture in unknown}
            for batch in _batches(unknown, self.infer_batch_size):
                # What finishes an item's rows is launched with its forward: after the next one it would wait for that.
                step = partial(self._step, batch, parts, waiting, known)
                yield from self._take(waiting, *self.lane.forward(step))
        finally:
            self.budget.give_back(sum(map(_tiles, waiting.values())))

    def _take(self, waiting: Waiting, done: Rows, mark: Mark) -> Iterator[Encoded]:
        for index, rows in done.items():
            group = waiting.pop(index)
            yield Encoded(index, len(group), _tiles(group), rows, mark, self.budget)

    def _recall(self, waiting: Waiting, known: Mapping[Hashable, Picture]) -> Rows:
        """Gives pictures their rows that were seen before."""
        for key, picture in known.items():
            picture.rows = self.cache.get(key)
        return _finished(waiting, known)

    def _step(
        self,
        batch: list[tuple[Picture, slice]],
        parts: dict[Hashable, list[torch.Tensor]],
        waiting: Waiting,
        known: Mapping[Hashable, Picture],
    ) -> Rows:
        """Runs some pictures' tiles; a picture whose last tile is among them gets its rows from ``parts``."""
        readable = [(picture, rows) for picture, rows in batch if picture.readable(self.decoder)]
        if not readable:
            return _finished(waiting, known)
        tiles = [picture.part(rows) for picture, rows in readable]
        pieces = self.runner.run(joined(tiles)).split([len(piece) for piece in tiles])
        for (picture, rows), piece in zip(readable, pieces, strict=True):
            parts[picture.key].append(piece.flatten(0, 1))
            if rows.stop == picture.count:
                whole = parts.pop(picture.key)
                picture.rows = torch.cat(whole) if len(whole) > 1 else whole[0]
                self.cache.put(picture.key, picture.rows)
                picture.tiles = None
        return _finished(waiting, known)


def in_groups(finished: Iterable[Encoded], size: int) -> Iterator[list[Encoded]]:
    """Holds items back until ``size`` pictures are together, or no more come; what has no picture is not held.

    If ``finished`` raises, what is held is given out first: it is done, whatever became of the rest.
    """
    group: list[Encoded] = []
    try:
        for encoded in finished:
            if not encoded.pictures:
                yield [encoded]
                continue
            group.append(encoded)
            if sum(each.pictures for each in group) >= size:
                yield group
                group = []
    except Exception:
        if group:
            yield group
        raise
    if group:
        yield group


def _tiles(pictures: list[Picture]) -> int:
    return sum(picture.count for picture in pictures)


def _finished(waiting: Waiting, known: Mapping[Hashable, Picture]) -> Rows:
    """The items all of whose pictures have rows by now, with these rows in one tensor, and those that never will."""
    found: Rows = {}
    for index, group in waiting.items():
        errors = [error for picture in group if (error := known[picture.key].error) is not None]
        if errors:
            found[index] = errors[0]
            continue
        rows = [known[picture.key].rows for picture in group]
        done = [tensor for tensor in rows if tensor is not None]
        if len(done) == len(rows):
            found[index] = torch.cat(done) if len(done) > 1 else done[0] if done else None
    return found


def _batches(pictures: list[Picture], size: int) -> Iterator[list[tuple[Picture, slice]]]:
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
