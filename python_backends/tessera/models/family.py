"""The seam between a model family and everything else: how a picture is cut, what it costs, where its rows stand.

The name of an image's embedding: equal bytes, cut and encoded alike, have equal digests.

A picture that travels as its file's bytes, for the vision stage to decode: what preprocess writes into PIXELS.

Tensor PLAN has four int32 for each picture: its kind, then what its family's plan is on the wire. Of kind 0 PIXELS
holds the pixels as the family cuts them; of kind 1 a frame: the file's length in bytes (uint64), its stored width and
height and its EXIF orientation (uint32 each, little-endian), and the file itself; of kind 2 which of its units are
kept, a bit each (numpy.packbits), and the pixels of these.
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from tessera.errors import InvalidRequest

#: (picture uint8 [H, W, 3], width, height) -> uint8 [height, width, 3]
Resize = Callable[[np.ndarray, int, int], np.ndarray]


@dataclass(frozen=True)
class View:
    """The whole picture resized once and cut: uint8 [height, width, 3], reshaped to ``split``, its axes in ``order``,
    flattened.

    ``split`` is (rows of units, what makes up a unit's height, columns of units, as much for its width, 3).
    """

    width: int
    height: int
    split: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of units of cost."""
        return self.split[0], self.split[len(self.split) // 2]


@dataclass(frozen=True)
class ImagePlan:
    """What becomes of one picture, known from its size alone; opaque outside of its family.

    ``tokens``: the rows that the vision encoder gives. ``cost``: units of the vision stage's work, such as tiles; all
    have as many bytes. ``wire``: what tensor PLAN says of the picture behind its kind. ``views``: its pixels, one after
    the other. ``kept``: which of their units it still has, a bit each (numpy.packbits); None: all.
    """

    tokens: int
    cost: int
    wire: tuple[int, int, int]
    views: tuple[View, ...]
    kept: bytes | None = None

    @property
    def pixel_bytes(self) -> int:
        """Of all units, kept or not."""
        return 3 * sum(view.width * view.height for view in self.views)

    @property
    def told(self) -> tuple[int, int, int] | tuple[int, int, int, bytes]:
        """What the tower is told of the picture: ``wire``, and ``kept`` where that is not all."""
        return self.wire if self.kept is None else (*self.wire, self.kept)


class ModelFamily(ABC):
    """One kind of vision-language model. Stateless apart from its configuration; safe to share."""

    #: the token whose positions image rows take, and its id in the checkpoint's vocabulary if the config names it
    image_token: str
    image_token_id: int | None
    #: what the checkpoint's chat template writes in the image token's place, where that is no token
    template_image: str | None = None
    #: every token that ``placeholder_tokens`` may name
    control_tokens: tuple[str, ...]
    #: special tokens that a user's text may use with their meaning (grounding marks); all others are plain text there
    user_tokens: tuple[str, ...] = ()
    #: what cost counts, for messages, and the uint8 shape of one such unit
    cost_unit: str
    unit_shape: tuple[int, ...]
    #: the most that one request may cost where the deployment sets no limit
    max_cost: int
    #: which of ``sampling.POLICY_KEYS`` say how finely its pictures are cut
    policy_keys: tuple[str, ...] = ()
    #: the names that ``tile_policy`` may have
    policy_names: tuple[str, ...] = ()
    #: how a client has less made of its pictures, for messages
    reduce_hint: str = "send smaller pictures"

    def policy(self, asked: Mapping[str, Any], default: Any = None, max_cost: int | None = None) -> Any:
        """What a deployment or a request ``asked`` for, by POLICY_KEYS (None: nothing), parsed for ``plan``.

        ``default`` (None: the checkpoint's own) stands for what it leaves open. Raises InvalidRequest, also where
        ``asked`` allows a picture to cost more than ``max_cost``.
        """
        for name, value in asked.items():
            if value is not None and name not in self.policy_keys:
                known = ", ".join(self.policy_keys) or "none"
                raise InvalidRequest(f"{name} means nothing to this model (what does: {known}); leave it out")
        return default

    @abstractmethod
    def low_detail(self, policy: Any) -> Any:
        """The policy for a picture of which the least detail is enough; ``policy`` is that of the others."""

    @property
    def marker_text(self) -> str:
        """What an ``<image>`` marker in a text becomes: the image token, with what chat templates put around it."""
        return self.image_token

    @abstractmethod
    def plan(self, width: int, height: int, policy: Any) -> ImagePlan:
        """Plan for a picture of ``width`` x ``height`` pixels (after EXIF rotation).

        Raises InvalidRequest where the picture, or the policy, allows no plan.
        """

    def largest_picture(self, policy: Any) -> int:
        """What one picture may cost by ``policy``, if its tower takes it whole; 0 if it may be divided."""
        return 0

    @abstractmethod
    def plan_of(self, wire: tuple[int, int, int]) -> ImagePlan:
        """The plan whose wire form this is. Raises InvalidRequest where there is none."""

    def prunes(self, policy: Any) -> bool:
        """Whether units of a picture may be left out by this policy, as :meth:`distinct` says."""
        return False

    def distinct(self, units: np.ndarray) -> np.ndarray:
        """Which units of a picture are to be kept, bool [cost]; ``units`` uint8 [cost, bytes of each], as they are
        cut."""
        raise NotImplementedError

    def without(self, plan: ImagePlan, kept: bytes) -> ImagePlan:
        """The plan of a picture that has the units which are ``kept``, a bit each, of those of ``plan``. Raises
        InvalidRequest where there can be no such plan."""
        raise InvalidRequest(f"this model takes whole pictures, with all their {self.cost_unit}")

    def last_part(self, plan: ImagePlan) -> ImagePlan | None:
        """The plan of one unit whose pixels, and rows, are the last of this plan's; None where there is none."""
        return None

    @abstractmethod
    def placeholder_tokens(self, plan: ImagePlan) -> tuple[tuple[str, int], ...]:
        """(special token, repetitions) that take the place of the prompt's one image token."""

    def positions(self, input_length: int, spans: np.ndarray, plans: Sequence[ImagePlan]) -> np.ndarray | None:
        """Rotary positions of the prompt, int32 [axes, input_length]; None: 0 to input_length - 1, of one axis.

        ``spans`` int32 [k, 2]: (start, length) of each picture's rows. The answer goes on at the highest position + 1.
        """
        return None

    def cut(self, picture: np.ndarray, plan: ImagePlan, resize: Resize, out: np.ndarray) -> None:
        """Fill ``out``, uint8 [plan.pixel_bytes], with the views of ``picture``, uint8 [H, W, 3], upright."""
        start = 0
        for view in plan.views:
            pixels = resize(picture, view.width, view.height).reshape(view.split).transpose(view.order)
            out[start : start + pixels.size].reshape(pixels.shape)[:] = pixels
            start += pixels.size


def units_of(kept: bytes, count: int) -> np.ndarray:
    """An ImagePlan's ``kept``, for a picture of ``count`` units, as bool [count]."""
    return np.unpackbits(np.frombuffer(kept, np.uint8), count=count).astype(bool)


WHOLE = 64 << 20  # bytes of a file up to which it is read whole
SAMPLES = 16
SAMPLE_BYTES = 4096
READ_BY_THE_SERVER = (".json", ".jinja", ".model", ".py", ".txt", ".safetensors")


def digest(encoded: bytes, kind: int, plan: ImagePlan, settings: str, checkpoint: bytes) -> np.ndarray:
    """blake2b-128 over encoded bytes, preprocessing settings and checkpoint id, as int64 [2], and, by exclusive or,
    over what PLAN says and the plan's views, so that from one cut's digest follows another's.

    Known before anything is decoded. Every part goes in with its length, so that none can imitate another.
    """
    hasher = blake2b(digest_size=16)
    for part in (encoded, settings.encode(), checkpoint):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return np.frombuffer(hasher.digest(), dtype="<i8").astype(np.int64) ^ _of_cut(kind, plan)


def cut_otherwise(digest: np.ndarray, kind: int, plan: ImagePlan, other: ImagePlan) -> np.ndarray:
    """The digest, int64 [2], of a picture by an ``other`` plan, from that by its own."""
    return digest ^ _of_cut(kind, plan) ^ _of_cut(kind, other)


@lru_cache(maxsize=4096)
def _of_cut(kind: int, plan: ImagePlan) -> np.ndarray:
    cut = json.dumps([kind, plan.wire, [astuple(view) for view in plan.views]])
    return np.frombuffer(blake2b(cut.encode(), digest_size=16).digest(), dtype="<i8").astype(np.int64)


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


KIND_PIXELS, KIND_ENCODED, KIND_PRUNED = 0, 1, 2
FRAME = struct.Struct("<QIII")
LEAST_SIDE = 8  # libjpeg spreads the chroma of narrower pictures in another way
MOST_SIDE = 65535  # of any JPEG


@dataclass(frozen=True)
class EncodedPicture:
    """``data``: a JPEG file, uint8 [bytes]; ``width`` x ``height`` pixels as stored, before ``orientation`` (1..8)."""

    data: np.ndarray
    width: int
    height: int
    orientation: int = 1

    @property
    def upright_size(self) -> tuple[int, int]:
        """(width, height) after rotation: orientations 5..8 lie on their side."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)

    @property
    def size_text(self) -> str:
        return f"{self.width}x{self.height} pixels"

    def framed(self) -> np.ndarray:
        """What stands in PIXELS, uint8."""
        head = FRAME.pack(self.data.size, self.width, self.height, self.orientation)
        return np.concatenate([np.frombuffer(head, dtype=np.uint8), self.data])

    @staticmethod
    def read(pixels: np.ndarray, start: int, name: str) -> tuple[EncodedPicture, int]:
        """The picture whose frame begins at ``start`` of PIXELS, a view of it, and where the next one begins.

        Raises InvalidRequest that calls the picture ``name`` where the frame cannot be right.
        """
        left = pixels.size - start - FRAME.size
        if left < 0:
            raise InvalidRequest(f"{name}: PIXELS ends {-left} bytes inside its frame of {FRAME.size}")
        length, width, height, orientation = FRAME.unpack_from(pixels.data, start)
        if not 0 < length <= left:
            raise InvalidRequest(f"{name}: its frame states {length} bytes; PIXELS has {left} after it")
        if not (0 < width <= MOST_SIDE and 0 < height <= MOST_SIDE and 1 <= orientation <= 8):
            raise InvalidRequest(f"{name}: its frame states {width}x{height} pixels of orientation {orientation}")
        begin = start + FRAME.size
        return EncodedPicture(pixels[begin : begin + length], width, height, orientation), begin + length
