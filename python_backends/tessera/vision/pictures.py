"""A request's tensors as pictures: what the wire says, checked.

Pictures that travel encoded, decoded, resized and cut on the GPU inside the vision process.

NVIDIA's nvImageCodec decodes, on the GPU's JPEG engines where it has some, which work side by side and leave the
multiprocessors to the towers. What follows gives the grey levels of the CPU way (libjpeg-turbo, then the `reference`
resize of preprocess).
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from tessera.errors import ConfigError, InvalidRequest
from tessera.models.family import (
    KIND_ENCODED,
    KIND_PIXELS,
    KIND_PRUNED,
    EncodedPicture,
    ImagePlan,
    ModelFamily,
    View,
    cut_otherwise,
)

DECODING_BYTES = 2 << 30  # of a GPU's memory
_PLAN_LENGTH = 4  # kind and t, h, w
Pixels = np.ndarray | torch.Tensor  # uint8 [cost, *unit_shape], on the host or on a device


@dataclass(frozen=True)
class VisionItem:
    """One request's pictures: uint8 pixels (flat, all pictures in order), int32 plan [4k], int64 digest [2k].

    Pictures of kinds 1 and 2 have more than pixels in ``pixels`` (``models/family.py``).
    """

    pixels: np.ndarray
    plan: np.ndarray
    digest: np.ndarray


@dataclass
class Picture:
    """One picture on its way, with its ``pixels``, or ``encoded`` until they are needed.

    ``rows`` [tokens, hidden] once they are known, until then in ``parts`` of several forwards, or the ``error`` why
    they never will be: InvalidRequest where the file is at fault. ``last_key``: of the picture that is this one's last
    unit; ``last_rows``: its rows, if they were known.
    """

    key: Hashable
    plan: ImagePlan
    pixels: Pixels | None = None
    encoded: Undecoded | None = None
    parts: list[torch.Tensor] = field(default_factory=list)
    rows: torch.Tensor | None = None
    error: Exception | None = None
    last_key: Hashable = None
    last_rows: torch.Tensor | None = None

    @property
    def units(self) -> int:
        """How many of its units are to be computed, the first ones."""
        return self.plan.cost - (self.last_rows is not None)

    @property
    def undecoded(self) -> bool:
        """Whether it is still encoded, and its rows still needed."""
        return self.encoded is not None and self.pixels is None and self.rows is None and self.error is None

    def take(self, decoded: torch.Tensor | Exception, unit_shape: tuple[int, ...]) -> None:
        """Its decoded pixels, or why it has none: its own request alone fails then, whatever went wrong."""
        if isinstance(decoded, torch.Tensor):
            self.pixels = decoded.view(self.plan.cost, *unit_shape)
        elif isinstance(decoded, InvalidRequest) and self.encoded:
            self.error = InvalidRequest(f"the picture of {self.encoded[0].size_text} cannot be decoded: {decoded}")
        else:
            self.error = decoded

    def rows_of(self, units: slice) -> int:
        """How many rows some of the units become."""
        return (units.stop - units.start) * self.plan.tokens // self.plan.cost


def joined(parts: Sequence[Pixels], pinned: bool = False) -> Pixels:
    """Pixels one after the other: an array, or, ``pinned``, a tensor that a GPU can fetch by itself; where one part is
    on a device already, a tensor there."""
    device = next((part.device for part in parts if isinstance(part, torch.Tensor)), None)
    if device is None and pinned:
        whole = torch.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=torch.uint8, pin_memory=True)
        np.concatenate(parts, out=whole.numpy())
        return whole
    if len(parts) == 1:
        return parts[0]
    if device is None:
        return np.concatenate(parts)
    return torch.cat([torch.as_tensor(part).to(device) for part in parts])


def pictures_of(item: VisionItem, family: ModelFamily, decoder: GpuDecoder | None = None) -> list[Picture]:
    """One request's pictures, in order; views of the item's pixels. Without a decoder none may be encoded.

    Raises InvalidRequest when pixels, plan and digest do not agree, and for what can never be decoded.
    """
    if item.plan.size % _PLAN_LENGTH:
        raise InvalidRequest(f"PLAN has {item.plan.size} values; it needs {_PLAN_LENGTH} for each picture")
    plans = item.plan.reshape(-1, _PLAN_LENGTH).tolist()
    if item.digest.size != 2 * len(plans):
        raise InvalidRequest(f"DIGEST has {item.digest.size} values for {len(plans)} pictures; it needs 2 each")
    pictures, start = [], 0
    for number, (kind, t, h, w) in enumerate(plans):
        name = f"picture {number}"
        try:
            plan = family.plan_of((t, h, w))
            if kind == KIND_PRUNED:
                kept = item.pixels[start : start - (-plan.cost // 8)]
                plan, start = family.without(plan, kept.tobytes()), start + kept.size
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}: {error}") from None
        digest = item.digest[2 * number : 2 * number + 2]
        picture = Picture((*digest.tolist(), kind, t, h, w), plan)
        if last := family.last_part(plan):
            picture.last_key = (*cut_otherwise(digest, kind, plan, last).tolist(), kind, *last.wire)
        if kind == KIND_ENCODED:
            if decoder is None:
                raise InvalidRequest(
                    f"{name} is encoded, and this vision stage decodes none: set gpu_pixels for both stages or neither"
                )
            file, start = EncodedPicture.read(item.pixels, start, name)
            picture.encoded = file, plan.views
            decoder.check(picture.encoded)
        elif kind in (KIND_PIXELS, KIND_PRUNED):
            end = start + plan.cost * prod(family.unit_shape)
            pixels, start = item.pixels[start:end], end
            if end <= item.pixels.size:
                picture.pixels = pixels.reshape(plan.cost, *family.unit_shape)
        else:
            raise InvalidRequest(
                f"{name} is of kind {kind}; known are {KIND_PIXELS} (pixels), {KIND_ENCODED} (a file) and "
                f"{KIND_PRUNED} (some of its pixels)"
            )
        pictures.append(picture)
    if start != item.pixels.size:
        raise InvalidRequest(f"PIXELS has {item.pixels.size} bytes; the plan needs {start}")
    return pictures


Undecoded = tuple[EncodedPicture, Sequence[View]]
# Bytes for each pixel: of every picture decoded at once (the engine's own, three channels), and of every view's pixels;
# of the one picture being resized (its channels as numbers), of what is between the two passes, and of a view.
DECODED_BYTES, KEPT_BYTES, RESIZED_BYTES, BETWEEN_BYTES, VIEW_BYTES = 12, 6, 15, 24, 30


class GpuDecoder:
    """Encoded pictures -> the pixels of their views, on one device, for one thread.

    ``capacity`` bounds the bytes that decoding takes there.
    """

    def __init__(self, device: str, capacity: int = DECODING_BYTES) -> None:
        self._device = torch.device(device)
        self._capacity = capacity
        self._codec: Any = None

    def check(self, undecoded: Undecoded) -> None:
        """Raises InvalidRequest for a picture that takes more memory than there is for decoding."""
        size, (picture, _) = bytes_of([undecoded]), undecoded
        if size > self._capacity:
            raise InvalidRequest(
                f"a picture of {picture.size_text} takes {size} bytes to decode on the GPU, and the vision stage keeps "
                f"{self._capacity} for that: send it smaller, or serve with gpu_pixels 0"
            )

    @torch.inference_mode()
    def pixels(self, line: Sequence[Undecoded]) -> list[torch.Tensor | Exception]:
        """For the first pictures of the line, as many as fit at once but one at least: uint8 [bytes of all views].

        In place of one whose file cannot be decoded or is not what its frame states, an InvalidRequest. All runs on a
        stream of its own, for a decoder waits for what its stream was given before.
        """
        if self._codec is None:
            self._start()
        taken = list(line[:1])
        while len(taken) < len(line) and bytes_of(line[: len(taken) + 1]) <= self._capacity:
            taken.append(line[len(taken)])
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            found = self._decoded([picture for picture, _ in taken])
            for number, (picture, views) in enumerate(taken):
                planes = found[number]
                if isinstance(planes, torch.Tensor):
                    found[number] = pixels_of(planes, picture.orientation, views)
                    found[number].record_stream(current)
        current.wait_stream(self._stream)
        return found

    def _decoded(self, pictures: list[EncodedPicture]) -> list[Any]:
        """uint8 [3, height, width] as stored, or why not."""
        sources = {}
        damaged = InvalidRequest("its JPEG data are damaged or of an unusual kind; save it again")
        found: list[Any] = [damaged] * len(pictures)
        for number, picture in enumerate(pictures):
            try:
                source = self._codec.CodeStream(picture.data)
                size = source.width, source.height
            except RuntimeError:
                continue
            if size == (picture.width, picture.height):
                sources[number] = source
            else:
                found[number] = InvalidRequest(f"it is {size[0]}x{size[1]} pixels; announced were {picture.size_text}")
        images = self._decoder.decode([*sources.values()], params=self._form, cuda_stream=self._stream.cuda_stream)
        for number, image in zip(sources, images, strict=True):
            if image is not None:
                found[number] = torch.as_tensor(image, device=self._device)
        return found

    def _start(self) -> None:
        os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # what it says of damaged files, the request's error says
        try:
            from nvidia import nvimgcodec as codec
        except ImportError as error:
            raise ConfigError(
                f"decoding on the GPU needs the packages nvidia-nvimgcodec-cu13 and nvidia-nvjpeg ({error}): install "
                "them, or set preprocess.gpu_pixels to 0"
            ) from None
        # What the engines do not take goes to libjpeg-turbo: nvJPEG's own kernels are off by up to three grey levels.
        kinds = codec.BackendKind.HW_GPU_ONLY, codec.BackendKind.CPU_ONLY
        self._form = codec.DecodeParams(False, codec.ColorSpec.SRGB, False, codec.SampleFormat.P_RGB)
        self._decoder = codec.Decoder(
            device_id=torch.cuda.current_device() if self._device.index is None else self._device.index,
            backends=[codec.Backend(kind) for kind in kinds],
            options=":fancy_upsampling=1",  # as libjpeg spreads chroma; the nearest blurs the edges of coloured letters
        )
        self._stream = torch.cuda.Stream(self._device)
        self._codec = codec


def bytes_of(pictures: Sequence[Undecoded]) -> int:
    """The most of the GPU's memory that decoding and cutting them at once take, their pixels included."""
    held, largest = 0, 0
    for picture, views in pictures:
        (width, height), seen = picture.upright_size, [view.width * view.height for view in views]
        between = max(max(view.width * height, width * view.height) for view in views)
        held += DECODED_BYTES * width * height + KEPT_BYTES * sum(seen)
        largest = max(largest, RESIZED_BYTES * width * height + BETWEEN_BYTES * between + VIEW_BYTES * max(seen))
    return held + largest


def pixels_of(planes: torch.Tensor, orientation: int, views: Sequence[View]) -> torch.Tensor:
    """uint8 [3, height, width] as stored, and its EXIF orientation (1..8) -> uint8 [bytes of all views].

    In float32: float16 is no quicker here and off by a level in every tenth value.
    """
    if orientation >= 5:
        planes = planes.transpose(1, 2)
    flips = ([2] if orientation in (2, 3, 6, 7) else []) + ([1] if orientation in (3, 4, 7, 8) else [])
    numbers = planes.flip(flips).float()[None]
    cuts = [resized(numbers, view)[0].to(torch.uint8).permute(1, 2, 0).reshape(view.split) for view in views]
    return torch.cat([part.permute(view.order).flatten() for part, view in zip(cuts, views, strict=True)])


def resized(numbers: torch.Tensor, view: View) -> torch.Tensor:
    """Whole numbers [1, 3, rows, columns] -> [1, 3, height, width]: Pillow 13's antialiased bicubic.

    Whole numbers between its two passes as well, which come in the order of ``preprocess/decode.py``.
    """
    rows, columns = numbers.shape[2:]
    down_first = view.height < rows and rows - view.height > 2 * (columns - view.width)
    for size in ((view.height, columns) if down_first else (rows, view.width), (view.height, view.width)):
        if size != numbers.shape[2:]:
            numbers = interpolate(numbers, size=size, mode="bicubic", antialias=True).round_().clamp_(0, 255)
    return numbers
