"""The standard workloads as data, and the pictures they are made of.

Every figure of this project, and of what it is compared with, is taken on these: distinct pictures, one fixed
prompt, greedy, a fixed number of tokens (`ignore_eos`), closed loop.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

PROMPT = (
    "You are inspecting a rental flat for safety. Look at the picture and answer with one word: "
    "is there an exposed electrical wire, yes or no?"
)
QUESTIONS = (
    PROMPT,
    *(
        f"{PROMPT.partition(': ')[0]}: {question}, yes or no?"
        for question in ("is the window open", "is a fire extinguisher in sight", "does anything block the door")
    ),
)
GRID = 16
NOISE = 12
JPEG_QUALITY = 90
FEW, LARGE = 4, 4_000_000
"""A dealer draws no more than this many pictures of more pixels than that: they take up to a second each."""


@dataclass(frozen=True)
class Workload:
    """One closed-loop workload. Pictures are ``width`` x ``height`` pixels; every answer has ``tokens`` tokens."""

    name: str
    width: int
    height: int
    tokens: int
    concurrency: int
    max_tiles: int | None = None
    """None is the checkpoint's own tile policy."""
    figures: str = "serve"
    """What its figures' names begin with: serve, or docs for those of a document model."""
    of_any_shape: bool = False
    """It is asked of models of several shapes, which its figures' names say."""
    prompts: tuple[str, ...] = (PROMPT,)
    """Asked about each picture, one after the other."""
    text_first: bool = False
    """The prompt stands before the picture."""
    always_streamed: bool = False
    priority: int = 0
    least: int = 0
    """Steady answers, where the rule of counting has fewer: few callers of long answers, whose first requests come
    together, wait for each other for some rounds. Simulated, the first 50 of W7b have 4.5 % less than later ones."""

    @property
    def streamed(self) -> bool:
        """Whether answers are streamed: those long enough for it to matter are."""
        return self.always_streamed or self.tokens > 16

    @property
    def sampling(self) -> dict[str, Any]:
        """Keyword arguments for the client's ``ask`` and ``stream``."""
        tiles = {} if self.max_tiles is None else {"max_tiles": self.max_tiles}
        rank = {"priority": self.priority} if self.priority else {}
        return {"temperature": 0, "ignore_eos": True, "max_tokens": self.tokens, **tiles, **rank}

    def question(self, prompt: str) -> str:
        """The prompt for the client's ``ask`` and ``stream``, with the place of the picture where it is not before."""
        return f"{prompt}\n<image>" if self.text_first else prompt

    def figure(self, label: str, checkpoint: Path | None = None) -> str:
        """The name of its figures, without what each of them is. ``label``: bf16, which docs do not name, fp8, ...;
        ``checkpoint``: that of the model, where it is known."""
        named = [label] if label != "bf16" or self.figures == "serve" else []
        shape = [shape_name(checkpoint)] if checkpoint and self.of_any_shape else []
        return ".".join([self.figures, self.name, *shape, *named])


def shape_name(checkpoint: Path) -> str:
    """What figures call a model: qwen3-vl-8b for loadtest/shapes/qwen3-vl-8b-shape."""
    folder = checkpoint.resolve()
    return (folder.parent if folder.name == "checkpoint" else folder).name.removesuffix("-shape")


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", 448, 448, tokens=4, concurrency=256),
        Workload("W2", 480, 320, tokens=4, concurrency=256, max_tiles=12),
        Workload("W3", 1920, 1080, tokens=4, concurrency=192),
        Workload("W4a", 448, 448, tokens=256, concurrency=64),
        Workload("W4b", 448, 448, tokens=256, concurrency=10),
        Workload("W5a", 1036, 1036, tokens=4, concurrency=256, figures="docs"),
        Workload("W5b", 448, 448, tokens=4, concurrency=256, figures="docs"),
        Workload("W5c.c64", 1036, 1036, tokens=256, concurrency=64, figures="docs"),
        Workload("W5c.c10", 1036, 1036, tokens=256, concurrency=10, figures="docs"),
        Workload("W6", 448, 448, tokens=4, concurrency=256, prompts=QUESTIONS),
        Workload("W6.text_first", 448, 448, tokens=4, concurrency=256, prompts=QUESTIONS, text_first=True),
        Workload("W7a", 1024, 1024, tokens=4, concurrency=256, of_any_shape=True),
        Workload("W7b", 1024, 1024, tokens=256, concurrency=10, of_any_shape=True, least=200),
        Workload("W7c", 448, 448, tokens=4, concurrency=256, of_any_shape=True),
        Workload("W8a", 3840, 2160, tokens=4, concurrency=32, of_any_shape=True),
        Workload("W8b", 7680, 4320, tokens=4, concurrency=32, of_any_shape=True),
    )
}


def picture(width: int, height: int, seed: int | Sequence[int]) -> bytes:
    """One JPEG: a smooth random colour field with fine noise on it. Equal seeds give equal bytes, others never.

    Such a picture costs the server what a photograph of its size costs, and no cache can have it.
    """
    return _encode(_draw(np.random.default_rng(seed), width, height))


def _draw(random: np.random.Generator, width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """The next picture of a stream: its colour field (a pixel for each 16 x 16) and its noise, both uint8 [h, w, 3]."""
    field = random.integers(0, 255, (height // GRID + 1, width // GRID + 1, 3), dtype=np.uint8)
    return field, random.integers(0, NOISE, (height, width, 3), dtype=np.uint8)


def _encode(drawn: tuple[np.ndarray, np.ndarray]) -> bytes:
    field, noise = drawn
    height, width = noise.shape[:2]
    smooth = cv2.resize(field, (width, height), interpolation=cv2.INTER_CUBIC)
    encoded, jpeg = cv2.imencode(".jpg", cv2.add(smooth, noise), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    if not encoded:
        raise ValueError(f"OpenCV cannot encode a picture of {width} x {height} pixels")
    return jpeg.tobytes()


class Pictures:
    """Deals out distinct pictures of one workload to any number of threads: one stream of random numbers, the same
    that the peers' load generator draws from, so that equal seeds give both servers equal pictures.

    A stock is made before the load begins, so that making pictures takes no time from it; when the stock is used up,
    pictures are made on demand. Large ones are the same few pixels in files that a comment makes distinct, which is
    what the server's caches go by.

    Args:
        workload: gives the size.
        seed: of this run and this process; two dealers with different seeds never deal the same picture.
        stock: how many to make in advance.
    """

    def __init__(self, workload: Workload, seed: int, stock: int = 0) -> None:
        self._size = (workload.width, workload.height)
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._drawn: list[bytes] = []
        if workload.width * workload.height > LARGE:
            self._drawn = [self._make() for _ in range(min(FEW, max(1, stock)))]
        self._stock = deque(self._make() for _ in range(stock))

    @property
    def left(self) -> int:
        """Pictures of the stock not yet dealt."""
        return len(self._stock)

    def deal(self) -> bytes:
        """A picture that was not dealt before."""
        try:
            return self._stock.popleft()
        except IndexError:
            return self._make()

    def _make(self) -> bytes:
        with self._lock:
            if self._drawn:
                self._drawn.append(self._drawn.pop(0))
                return with_comment(self._drawn[-1], self._random.bytes(16))
            drawn = _draw(self._random, *self._size)
        return _encode(drawn)


def with_comment(jpeg: bytes, comment: bytes) -> bytes:
    """A JPEG whose first segment (OpenCV's JFIF header) is followed by a comment."""
    end = 4 + int.from_bytes(jpeg[4:6], "big")
    return jpeg[:end] + b"\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment + jpeg[end:]
