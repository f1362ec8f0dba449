"""Where training pictures come from: renderer processes, a replay store on the device, batches drawn from it.

Each picture is trained on more than once because a GPU wants more than 15 cores can draw: 700 a second, of which 404
were new, on an H200."""

import argparse
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cv2
import numpy as np
import torch
from augment import Layout, layout, random_gain, random_policy, tile_windows
from feed import Feed, Item
from sequences import IGNORE, Branch, ChatTokens, PackedBranches, pack

MAX_PICTURE_BYTES = 1920 * 1920 * 3
MAX_BOXES = 64
VARIANTS = 3  # choices of questions that come with each picture
SLOTS = 4  # pictures that a process may be ahead by


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


class Renderer:
    """Makes one process's pictures. Choosing and packing questions happens here, where cores are to spare; each process
    balances what it asks itself."""

    def __init__(self, world: Any, asking: Asking, classes: Sequence[str]) -> None:
        self._world, self._asking = world, asking
        self._index = {name: i for i, name in enumerate(classes)}
        self._balance, self._rng = Balance(asking.share), random.Random()

    def __call__(self, seed: int) -> Item:
        drawn = self._world.sample(seed, "train")
        # The pixels a server sees have been through a JPEG file, so those of training are too.
        encoded = np.frombuffer(self._world.encode_jpeg(drawn), np.uint8)
        pixels = cv2.cvtColor(cv2.imdecode(encoded, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
        height, width = pixels.shape[:2]
        boxes = [
            (self._index[name], x0 / width, y0 / height, x1 / width, y1 / height)
            for name, x0, y0, x1, y1 in self._world.boxes(drawn)
            if name in self._index
        ][:MAX_BOXES]
        branch = self._asking.tokens.branch
        asked = [Asked(group_of(q), branch(q.text, q.answer)) for q in self._world.questions(drawn)]
        self._rng.seed(seed)
        chosen = [self._balance.choose(asked, self._asking.questions, self._rng) for _ in range(VARIANTS)]
        branches = pack([[a.branch for a in row] for row in chosen], self._asking.length)
        return (np.array(boxes, np.float32).reshape(-1, 5), branches), [pixels]


class Store:
    """A ring of raw pictures on the device; the newest overwrite the oldest."""

    def __init__(self, capacity_bytes: int, device: torch.device):
        self.memory = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self.pictures: deque[Picture] = deque()
        self._head = 0
        self._stream = torch.cuda.Stream() if self.memory.is_cuda else None

    def add(self, pixels: np.ndarray, boxes: np.ndarray, branches: PackedBranches) -> None:
        start = self._make_room(pixels.size)
        self._head = start + pixels.size
        with torch.cuda.stream(self._stream):  # beside the training's, or this would wait for all that is queued there
            self.memory[start : self._head].copy_(torch.from_numpy(pixels).view(-1))
        if self._stream is not None:
            self._stream.synchronize()
        self.pictures.append(Picture(start, *pixels.shape[:2], boxes, branches))

    def _make_room(self, size: int) -> int:
        """Drop the oldest pictures that lie where the next `size` bytes go, and say where that is."""
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
        spare = min(len(self.pictures) // 20, 400)
        return self.pictures[rng.randrange(spare, len(self.pictures))]


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


class RoomFeed(Feed):
    """Puts what is rendered into the store and draws batches from there: of one number of tiles each, from a waiting
    list of its own. A run that goes on gets scenes that the earlier one cannot have reached."""

    def __init__(
        self,
        world: Any,
        asking: Asking,
        classes: Sequence[str],
        arguments: argparse.Namespace,
        first: int,
        device: torch.device,
    ) -> None:
        renderer = Renderer(world, asking, classes)
        super().__init__(renderer, 1000 + first * 1000, arguments.workers, SLOTS, MAX_PICTURE_BYTES)
        self._arguments, self._device = arguments, device
        self._store: Store | None = None
        self._rng = random.Random(first)
        self._waiting: dict[int, list[tuple[Picture, Layout]]] = {}

    def _receive(self, store: Store, wait: bool) -> bool:
        with self.item(wait) as found:
            if found is not None:
                (boxes, branches), (pixels,) = found
                store.add(pixels, boxes, branches)
        return found is not None

    def next(self) -> Batch:
        """The first one comes when enough pictures are rendered."""
        if self._store is None:
            self._store = store = Store(int(self._arguments.store_gb * 1e9), self._device)
            while len(store.pictures) < self._arguments.warm_pictures:
                self._receive(store, wait=True)
        store = self._store
        while self._receive(store, wait=False):
            pass
        while True:
            picture = store.draw(self._rng)
            plan = layout(picture.width, picture.height, random_policy(self._rng))
            waiting = self._waiting.setdefault(plan.tiles, [])
            waiting.append((picture, plan))
            if len(waiting) >= max(1, self._arguments.tiles // plan.tiles):
                return self._assemble(store, self._waiting.pop(plan.tiles))

    def _assemble(self, store: Store, entries: list[tuple[Picture, Layout]]) -> Batch:
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
            **{name: torch.from_numpy(stacked(name)) for name in ("ids", "number", "position")},
            "asked": torch.from_numpy(asked),
            "labels": torch.from_numpy(labels.reshape(-1)[asked]),
            "weights": torch.from_numpy(weights.reshape(-1)[asked]),
        }
        if self._device.type == "cuda":
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return Batch(store, [picture for picture, _ in entries], [plan for _, plan in entries], tensors)
