"""Where training pictures come from: renderer processes, a replay store on the device, batches drawn from it."""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from augment import Layout, Policy, layout, random_gain, random_policy, tile_windows
from sequences import IGNORE, Branch, ChatTokens, PackedBranches, pack
from trainer import hand_over

MAX_PICTURE_BYTES = 1920 * 1920 * 3
MAX_BOXES = 64
VARIANTS = 3  # choices of questions that come with each picture


@dataclass(frozen=True)
class Asked:
    """A question of a picture and the `group` it is balanced by: (kind, class, answer) or ("description",)."""

    group: tuple[str, ...]
    branch: Branch


@dataclass
class Picture:
    """A picture in the replay store: bytes from `offset` to `end`, boxes float32 [n,5] (class, fractions)."""

    offset: int
    height: int
    width: int
    boxes: np.ndarray
    branches: PackedBranches  # VARIANTS rows

    @property
    def end(self) -> int:
        return self.offset + 3 * self.height * self.width


def group_of(question: Any) -> tuple[str, ...]:
    return ("description",) if question.kind == "description" else (question.kind, question.cls, question.answer)


@dataclass
class Balance:
    """Chooses which questions of a picture to train on so that every group has been asked about equally often.

    `share` weighs a group; "yes" and "no" about one class are two groups, so each class ends up half yes, half no.
    """

    share: Callable[[tuple[str, ...]], float]
    asked: dict[tuple[str, ...], float] = field(default_factory=dict)

    def choose(self, candidates: Sequence[Asked], count: int, rng: random.Random) -> list[Asked]:
        def due(asked: Asked) -> float:
            return (self.asked.get(asked.group, 0) + 1) / self.share(asked.group) * rng.uniform(0.5, 2.0)

        chosen = sorted(candidates, key=due)[:count]
        for asked in chosen:
            self.asked[asked.group] = self.asked.get(asked.group, 0) + 1
        rng.shuffle(chosen)
        return chosen


@dataclass(frozen=True)
class Asking:
    """How pictures' questions become token rows: how many are tried and into how many places they must fit."""

    tokens: ChatTokens
    share: Callable[[tuple[str, ...]], float]
    questions: int
    length: int


def _render_forever(
    world: Any, asking: Asking, classes: Sequence[str], slots: mmap.mmap, free: Any, ready: Any, seeds: range
) -> None:
    """One renderer process: each picture into a free shared slot, its boxes and token rows through the queue.

    Choosing and packing questions happens here, where cores are to spare; each process balances what it asks itself.
    """
    import cv2

    cv2.setNumThreads(1)
    index = {name: i for i, name in enumerate(classes)}
    balance, rng = Balance(asking.share), random.Random(seeds.start)
    for seed in seeds:
        drawn = world.sample(seed, "train")
        # The pixels a server sees have been through a JPEG file, so those of training are too.
        encoded = np.frombuffer(world.encode_jpeg(drawn), np.uint8)
        pixels = cv2.cvtColor(cv2.imdecode(encoded, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
        height, width = pixels.shape[:2]
        boxes = [
            (index[name], x0 / width, y0 / height, x1 / width, y1 / height)
            for name, x0, y0, x1, y1 in world.boxes(drawn)
            if name in index
        ][:MAX_BOXES]
        asked = [Asked(group_of(q), asking.tokens.branch(q.text, q.answer)) for q in world.questions(drawn)]
        chosen = [balance.choose(asked, asking.questions, rng) for _ in range(VARIANTS)]
        branches = pack([[a.branch for a in row] for row in chosen], asking.length)
        slot = free.get()
        if slot is None:
            return
        start = slot * MAX_PICTURE_BYTES
        slots[start : start + pixels.size] = pixels.tobytes()
        ready.put((slot, height, width, np.array(boxes, np.float32).reshape(-1, 5), branches))


class Renderers:
    """`workers` forked processes that render training scenes without end; 0 renders in a thread of this process.

    Start it before CUDA is touched, and before other threads are about: a fork copies the locks that they hold.
    """

    def __init__(self, world: Any, asking: Asking, classes: Sequence[str], workers: int, first_seed: int):
        context = multiprocessing.get_context("fork")
        count = 4 * max(1, workers)
        self.slots = mmap.mmap(-1, count * MAX_PICTURE_BYTES)  # anonymous and shared: needs no /dev/shm
        self.free: Any = context.Queue() if workers else queue.Queue()
        self.ready: Any = context.Queue() if workers else queue.Queue()
        for slot in range(count):
            self.free.put(slot)

        def work(first: int) -> tuple[Any, ...]:
            seeds = range(first_seed + first, 1 << 40, max(1, workers))
            return (world, asking, classes, self.slots, self.free, self.ready, seeds)

        if not workers:
            threading.Thread(target=_render_forever, args=work(0), daemon=True).start()
        self.processes = [context.Process(target=_render_forever, args=work(i), daemon=True) for i in range(workers)]
        for process in self.processes:
            process.start()

    def close(self) -> None:
        self.free.put(None)
        for process in self.processes:
            process.terminate()


class Store:
    """A ring of raw pictures on the device; the newest overwrite the oldest."""

    def __init__(self, renderers: Renderers, capacity_bytes: int, device: torch.device):
        self.memory = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self.pictures: deque[Picture] = deque()
        self.received = 0
        self._head = 0
        self._renderers = renderers
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        staged = torch.frombuffer(self._renderers.slots, dtype=torch.uint8)
        stream = torch.cuda.Stream() if self.memory.is_cuda else None
        while not self._stop.is_set():
            try:
                slot, height, width, boxes, branches = self._renderers.ready.get(timeout=0.5)
            except queue.Empty:
                continue
            size = 3 * height * width
            start = self._make_room(size)
            end = start + size
            source = staged[slot * MAX_PICTURE_BYTES :][:size]
            if stream is None:
                self.memory[start:end] = source
            else:
                with torch.cuda.stream(stream):
                    self.memory[start:end].copy_(source)
                stream.synchronize()
            self._renderers.free.put(slot)
            with self._lock:
                self.pictures.append(Picture(start, height, width, boxes, branches))
                self.received += 1
            self._head = end

    def _make_room(self, size: int) -> int:
        """Drop the oldest pictures that lie where the next `size` bytes go, and say where that is."""
        with self._lock:
            start = self._head
            if start + size > self.memory.numel():
                # What the last round left beyond the head would otherwise stay in front of the queue for ever.
                while self.pictures and self.pictures[0].offset >= start:
                    self.pictures.popleft()
                start = 0
            while self.pictures and start < self.pictures[0].end and self.pictures[0].offset < start + size:
                self.pictures.popleft()
            return start

    def pixels(self, picture: Picture) -> torch.Tensor:
        """uint8 [H,W,3], a view of the ring."""
        return self.memory[picture.offset : picture.end].view(picture.height, picture.width, 3)

    def draw(self, rng: random.Random) -> Picture:
        """Any picture but the oldest few, which may be overwritten before the device gets to read them."""
        with self._lock:
            spare = min(len(self.pictures) // 20, 400)
            return self.pictures[rng.randrange(spare, len(self.pictures))]

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@dataclass
class Batch:
    """Pictures with one tile count: what to cut, and the packed questions."""

    store: Store
    pictures: list[Picture]
    layouts: list[Layout]
    tensors: dict[str, torch.Tensor]
    """gains [pictures,2,3]; boxes [pictures,64,5]; windows [pictures*tiles,4]; ids, number, position [pictures,length]
    of the branches; asked [n] flat places whose next token is an answer's, with labels [n] and weights [n]."""

    @property
    def tiles(self) -> int:
        return self.layouts[0].tiles


class Batches:
    """Fills one waiting list per tile count with freshly drawn pictures and hands out whichever is full first."""

    def __init__(
        self,
        store: Store,
        tiles: int,
        seed: int,
        policy: Callable[[random.Random], Policy] = random_policy,
        pinned: bool = False,
    ):
        self._store, self._policy, self._tiles, self._pinned = store, policy, tiles, pinned
        self._rng = random.Random(seed)
        self._waiting: dict[int, list[tuple[Picture, Layout]]] = {}
        self._ready: queue.Queue[Batch] = queue.Queue(maxsize=4)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        while not self._stop.is_set():
            picture = self._store.draw(self._rng)
            plan = layout(picture.width, picture.height, self._policy(self._rng))
            waiting = self._waiting.setdefault(plan.tiles, [])
            waiting.append((picture, plan))
            if len(waiting) < max(1, self._tiles // plan.tiles):
                continue
            batch = self._assemble(self._waiting.pop(plan.tiles))
            hand_over(self._ready, batch, self._stop)

    def _assemble(self, entries: list[tuple[Picture, Layout]]) -> Batch:
        boxes = np.full((len(entries), MAX_BOXES, 5), -1, np.float32)
        for i, (picture, _) in enumerate(entries):
            boxes[i, : len(picture.boxes)] = picture.boxes
        rows = [(picture.branches, self._rng.randrange(VARIANTS)) for picture, _ in entries]

        def stacked(name: str) -> np.ndarray:
            return np.stack([getattr(branches, name)[variant] for branches, variant in rows])

        labels, weights = stacked("label"), stacked("weight")
        asked = np.flatnonzero(labels != IGNORE)
        tensors = {
            "gains": torch.tensor([random_gain(self._rng) for _ in entries]),
            "boxes": torch.from_numpy(boxes),
            "windows": torch.tensor([window for _, plan in entries for window in tile_windows(plan)]),
            "ids": torch.from_numpy(stacked("ids")),
            "number": torch.from_numpy(stacked("number")),
            "position": torch.from_numpy(stacked("position")),
            "asked": torch.from_numpy(asked),
            "labels": torch.from_numpy(labels.reshape(-1)[asked]),
            "weights": torch.from_numpy(weights.reshape(-1)[asked]),
        }
        if self._pinned:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return Batch(self._store, [picture for picture, _ in entries], [plan for _, plan in entries], tensors)

    def next(self) -> Batch:
        return self._ready.get()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class RoomFeed:
    """Renderers, the store and the batches of a run. A run that goes on gets scenes that the earlier one cannot have
    reached."""

    def __init__(
        self,
        world: Any,
        asking: Asking,
        classes: Sequence[str],
        arguments: argparse.Namespace,
        first: int,
        device: torch.device,
    ) -> None:
        self._renderers = Renderers(world, asking, classes, arguments.workers, first_seed=1000 + first * 1000)
        self._arguments, self._first, self._device = arguments, first, device
        self._parts: list[Any] = [
            self._renderers
        ]  # closed from the last on: a store must not wait for a dying renderer
        self._batches: Batches | None = None

    def next(self) -> Batch:
        """The first one comes when enough pictures are rendered."""
        if self._batches is None:
            store = Store(self._renderers, int(self._arguments.store_gb * 1e9), self._device)
            self._parts.append(store)
            while len(store.pictures) < self._arguments.warm_pictures:
                time.sleep(0.1)
            pinned = self._device.type == "cuda"
            self._batches = Batches(store, self._arguments.tiles, seed=self._first, pinned=pinned)
            self._parts.append(self._batches)
        return self._batches.next()

    def close(self) -> None:
        while self._parts:
            self._parts.pop().close()
