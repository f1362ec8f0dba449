"""Batching around a runner: pictures of many requests in, their rows out.

What the pictures of all items cost (tiles, or patches) is lined up whatever request they belong to, cut into forwards
of at most ``infer_batch_size``, and the rows put back together by picture. Where a tower wants a picture's units in one
forward, none is cut, and one that alone costs more has a forward for itself. A picture seen before (same digest, same
plan) is not computed again. Each item goes out when its last forward is launched. Items that are asked for at once
may have a small forward of their own, beside the one under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.errors import ConfigError, InvalidRequest
from tessera.kernels.tower_attention import leaving_room
from tessera.models.family import ModelFamily
from tessera.models.registry import family_for, read_config
from tessera.models.tower import tower_class
from tessera.settings.stages import VisionSettings
from tessera.vision.fp8_tower import in_fp8
from tessera.vision.memory import COPIES_OF_ROWS, DeviceStreams, EmbeddingCache, LaunchedWork, RowBudget
from tessera.vision.pictures import DECODING_BYTES, GpuDecoder, Picture, Pixels, VisionItem, joined, pictures_of
from tessera.vision.runner import Runner, load_runner

_FULL = 7 / 8  # of infer_batch_size
Batch = list[tuple[Picture, slice]]  # of a forward: pictures, and which of their units
Waiting = dict[int, list[Picture]]  # an item's index -> its pictures
# An item's index -> its rows, or why it has none.
Rows = dict[int, "torch.Tensor | Exception | None"]


@dataclass(frozen=True)
class PendingRows:
    """An item's rows, perhaps still being computed: ``with pending.rows() as rows`` waits for them."""

    index: int
    _cost: int
    _rows: torch.Tensor | Exception | None
    _work: LaunchedWork
    _budget: RowBudget

    @contextmanager
    def rows(self) -> Iterator[torch.Tensor | None]:
        """Of all the item's pictures in order, [tokens, hidden], None without any; given up when it is left.

        It must be entered once, or their bytes stay counted. Items with the same picture may share rows: do not change
        them in place. Entering raises what kept a picture from being decoded, InvalidRequest if the file did.
        """
        try:
            if isinstance(self._rows, Exception):
                raise self._rows
            if self._rows is not None:
                self._work.wait(self._rows)
            yield self._rows
        finally:
            self._budget.give_back(self._cost)


@dataclass(eq=False)
class VisionEncoder:
    """Turns items into embeddings; used by one thread at a time.

    Args:
        runner: computes a forward.
        family: says what a picture's plan is.
        infer_batch_size: what the pictures of a forward cost at most.
        cache: of the rows of pictures seen before; without one all are computed.
        lane: where the runner's device works.
        budget: for rows on their way out; without one there is no limit.
        decoder: of pictures that travel encoded; without one they are refused.
        weights: what the runner keeps, for people: the kind of its weights, and bytes.
        largest_picture: what one picture may cost even if a forward takes less of several.
        engine_busy: whether the language model computes most of the time, on the same device.
        alone: each tile, or picture that is not split, has a forward for itself.
    """

    runner: Runner
    family: ModelFamily
    infer_batch_size: int = 4
    cache: EmbeddingCache = field(default_factory=EmbeddingCache)
    lane: DeviceStreams = field(default_factory=DeviceStreams)
    budget: RowBudget = field(default_factory=lambda: RowBudget(bytes_per_unit=0))
    decoder: GpuDecoder | None = None
    weights: tuple[str, int] = ("", 0)
    largest_picture: int = 0
    engine_busy: Callable[[], bool] = lambda: False
    alone: bool = False
    computed: int = field(default=0, init=False)  # pictures, but for those whose rows were known
    launching_s: float = field(default=0.0, init=False)  # of the host for forwards; on the CPU they are over then
    _last_cost: int = field(default=0, init=False)  # of the last forward that was not beside another

    @classmethod
    def from_checkpoint(
        cls, folder: Path | str | CheckpointConfig, settings: VisionSettings | None = None
    ) -> VisionEncoder:
        """Load the tower of a checkpoint.

        Raises CheckpointError or ConfigError saying what does not fit, the settings' memory included.
        """
        config = folder if isinstance(folder, CheckpointConfig) else read_config(folder)
        settings = (settings or VisionSettings()).in_dtype(tower_class(config).splits)
        runner, kept = load_runner(config, settings)
        tower, family, device = runner.tower, family_for(config), settings.device
        batch = settings.infer_batch_size * tower.batch_unit * runner.at_once
        try:
            largest_picture = family.largest_picture(family.policy({"tile_policy": settings.tile_policy}))
        except InvalidRequest as error:
            raise ConfigError(f"vision_encoder: {error}") from None
        largest = max(batch, largest_picture)
        (rows, hidden), dtype = tower.row_shape, getattr(torch, settings.dtype)
        budget = RowBudget.beside(
            {
                "weights": kept,
                "activations": runner.activation_bytes(largest),
                "pixels": largest * prod(tower.unit_shape),
                "cache": settings.cache_bytes,
            }
            | ({"decoding": DECODING_BYTES} if settings.gpu_pixels else {}),
            settings.memory_bytes,
            COPIES_OF_ROWS * rows * hidden * dtype.itemsize,
            largest,
            family.cost_unit,
            "" if largest == batch else f", or {family.reduce_hint} in preprocess.tile_policy",
        )
        return cls(
            runner,
            family,
            batch,
            EmbeddingCache(settings.cache_bytes, hidden, dtype, device),
            DeviceStreams(device),
            budget,
            GpuDecoder(device) if settings.gpu_pixels else None,
            ("fp8" if in_fp8(tower) else "int8" if settings.quantization == "int8" else settings.dtype, kept),
            largest_picture,
            alone=settings.deterministic and device == "cpu",
        )

    def encode(self, items: Sequence[VisionItem]) -> list[torch.Tensor | None]:
        """Rows [tokens, hidden] of each item (of all its pictures, in order); None for an item without pictures.

        Items with the same picture may share rows: do not change them in place. Raises InvalidRequest when an item's
        pixels, plan and digest do not agree, or a picture cannot be decoded.
        """
        found: dict[int, torch.Tensor | None] = {}
        for pending in self.launch(items):
            with pending.rows() as rows:
                found[pending.index] = rows
        return [found[index] for index in range(len(items))]

    def launch(
        self, items: Sequence[VisionItem], before_forward: Callable[[], None] = lambda: None, beside: bool = False
    ) -> Iterator[PendingRows]:
        """The same one by one, each as soon as the forwards that it needs are launched.

        ``before_forward`` is called when a forward is ready to be launched, perhaps while the one before is under way,
        which is waited for afterwards; it may have other items encoded. ``beside``: these items are as many as
        :meth:`fit_beside`, and their forward does not wait.

        Where rows would not fit the budget together, items are worked off in waves: the next begins when enough of
        what was given out has been entered and left. If a forward fails, what is done is given out before it raises.
        Raises InvalidRequest for an item that :meth:`pictures` refuses.
        """
        pictures = [self.pictures(item) for item in items]
        costs = [_cost(group) for group in pictures]
        for wave in self.budget.waves(costs):
            waiting = {index: pictures[index] for index in wave}
            for index in wave:  # their rows must be gone when their bytes are given to the next wave
                pictures[index] = []
            self.budget.reserve(sum(costs[index] for index in wave))
            yield from self._encode(waiting, before_forward, beside)

    def pictures(self, item: VisionItem) -> list[Picture]:
        """Raises InvalidRequest when an item's pixels, plan and digest do not agree or it can never fit."""
        pictures, tower = pictures_of(item, self.family, self.decoder), self.runner.tower
        self.budget.check(_cost(pictures))
        most = max(self.infer_batch_size, self.largest_picture)
        for number, picture in enumerate(pictures):
            if not tower.splits and picture.plan.cost > most:
                raise InvalidRequest(
                    f"picture {number} costs {picture.plan.cost} {self.family.cost_unit}; the vision tower takes at "
                    f"most {most} at once: {self.family.reduce_hint}, or raise visual_infer_batch_size"
                )
        return pictures

    def has_room(self, items: Sequence[VisionItem]) -> bool:
        """Whether the rows of these items fit beside those that are reserved."""
        return self.budget.has_room(sum(_cost(self.pictures(item)) for item in items))

    def fit_beside(self, items: Sequence[VisionItem]) -> int:
        """How many of the first items can be computed now, together, beside the forward under way; 0 if none is.

        Only items with pictures, none of which is known or encoded: cache and decoder work in the order of the other
        forwards.
        """
        if self.lane.free or self.runner.beside >= self._last_cost:
            return 0
        cost = 0
        for number, item in enumerate(items):
            pictures = self.pictures(item)
            cost += _cost(pictures)
            known = any(key in self.cache for picture in pictures for key in (picture.key, picture.last_key))
            new = not known and all(picture.pixels is not None for picture in pictures)
            if not pictures or cost > self.runner.beside or not new:
                return number
        return len(items)

    def _encode(self, waiting: Waiting, before_forward: Callable[[], None], beside: bool) -> Iterator[PendingRows]:
        """Takes items, whose rows are reserved, out of ``waiting`` as they are done."""
        known: dict[Hashable, Picture] = {}
        for index, group in waiting.items():  # equal ones are one from here on
            waiting[index] = [known.setdefault(picture.key, picture) for picture in group]
        try:
            yield from self._take(waiting, *self.lane.launch(partial(self._recall, waiting, known.values())))
            unknown = [picture for picture in known.values() if picture.rows is None]
            forward = self.lane.beside if beside else self.lane.forward
            size = 1 if self.alone else self.infer_batch_size
            for batch in _batches(unknown, size, self.runner.tower.splits):
                pixels = None  # where some are on the device, or will be
                if all(isinstance(picture.pixels, np.ndarray) for picture, _ in batch):
                    pixels = self._joined(batch)  # while the forward before is under way
                before_forward()
                # What finishes an item's rows is launched with its forward: after the next one it would wait for that.
                done = forward(partial(self._step, batch, pixels, waiting, known.values(), beside))
                del pixels  # of the batch after it there are others soon
                yield from self._take(waiting, *done)
        finally:
            self.budget.give_back(sum(map(_cost, waiting.values())))

    def _take(self, waiting: Waiting, done: Rows, work: LaunchedWork) -> Iterator[PendingRows]:
        for index, rows in done.items():
            yield PendingRows(index, _cost(waiting.pop(index)), rows, work, self.budget)

    def _recall(self, waiting: Waiting, known: Iterable[Picture]) -> Rows:
        """Gives pictures their rows that were seen before."""
        for picture in known:
            picture.rows = self.cache.get(picture.key)
            if picture.rows is None and self.runner.tower.splits:
                picture.last_rows = self.cache.get(picture.last_key)
        return _finished(waiting)

    def _joined(self, batch: Batch) -> Pixels:
        parts = [picture.pixels[units] for picture, units in batch if picture.pixels is not None]
        return joined(parts, pinned=self.lane.on_gpu)

    def _step(
        self, batch: Batch, pixels: Pixels | None, waiting: Waiting, known: Iterable[Picture], beside: bool
    ) -> Rows:
        """Runs some pictures' units; a picture whose last one is among them gets its rows. ``pixels``: all of
        theirs, None if they are not joined yet."""
        while any(picture.undecoded for picture, _ in batch):
            self._decode([picture for picture in known if picture.undecoded])
        readable = [(picture, units) for picture, units in batch if picture.pixels is not None]
        if not readable:
            return _finished(waiting)
        pixels = self._joined(readable) if pixels is None else pixels
        if not beside:
            self._last_cost = len(pixels)
        wires = [] if self.runner.tower.splits else [picture.plan.told for picture, _ in readable]
        # A full forward is one of many, for which the tower needs all that the GPU has.
        with leaving_room(len(pixels) < _FULL * self.infer_batch_size and self.engine_busy()):
            began = time.perf_counter()
            rows = self.runner.run(pixels, wires)
            self.launching_s += time.perf_counter() - began
        pieces = rows.split([picture.rows_of(units) for picture, units in readable])
        for (picture, units), piece in zip(readable, pieces, strict=True):
            picture.parts.append(piece)
            if units.stop == picture.units:
                picture.rows = _whole(picture.parts + ([] if picture.last_rows is None else [picture.last_rows]))
                self.computed += 1
                picture.parts, picture.pixels = [], None
                self.lane.in_order(partial(self.cache.put, picture.key, picture.rows), picture.rows)
        return _finished(waiting)

    def _decode(self, line: list[Picture]) -> None:
        """Some of the line's first, at least one: the decoder takes several at once, also for later forwards."""
        assert self.decoder is not None
        try:
            found = self.decoder.pixels([picture.encoded for picture in line if picture.encoded])
        except Exception as error:
            found = [error]
        for picture, decoded in zip(line, found, strict=False):
            picture.take(decoded, self.family.unit_shape)


def _cost(pictures: list[Picture]) -> int:
    return sum(picture.plan.cost for picture in pictures)


def _finished(waiting: Waiting) -> Rows:
    """The items all of whose pictures have rows by now, with these rows in one tensor, and those that never will."""
    found: Rows = {}
    for index, group in waiting.items():
        rows = [picture.rows for picture in group if picture.rows is not None]
        if error := next((picture.error for picture in group if picture.error is not None), None):
            found[index] = error
        elif len(rows) == len(group):
            found[index] = _whole(rows) if rows else None
    return found


def _whole(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _batches(pictures: list[Picture], size: int, splits: bool) -> Iterator[Batch]:
    """Cut the line of all units into batches of ``size`` (the last may be smaller).

    Where a picture must not be split the batch ends before it instead; one that is larger is a batch by itself. There
    a batch that begins with a large picture also takes at most half of what is left, down to a quarter of ``size``,
    which fills a GPU: large pictures gain little by company, and the first rows of a few should not wait for the last.
    """
    batch: Batch = []
    left, room = sum(picture.units for picture in pictures), 0
    for picture in pictures:
        cost, start = picture.units, 0
        while start < cost:
            if room <= 0 or (batch and not splits and cost > room):
                if batch:
                    yield batch
                large = not splits and cost >= size // 8
                batch, room = [], min(size, max(left // 2, size // 4)) if large else size
            stop = min(start + room, cost) if splits else cost
            batch.append((picture, slice(start, stop)))
            room, left = room - (stop - start), left - (stop - start)
            start = stop
    if batch:
        yield batch
