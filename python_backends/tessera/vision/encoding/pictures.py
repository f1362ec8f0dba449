"""A request's tensors as pictures: what the wire says, checked."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tessera.errors import InvalidRequest
from tessera.family.encoded_picture import KIND_ENCODED, KIND_PIXELS, EncodedPicture
from tessera.family.family import ImagePlan, ModelFamily
from tessera.vision.decoding.decoder import GpuDecoder, Undecoded

_PLAN_LENGTH = 4  # kind and t, h, w
Pixels = np.ndarray | torch.Tensor  # uint8 [cost, *unit_shape], on the host or on a device


@dataclass(frozen=True)
class VisionItem:
    """One request's pictures: uint8 pixels (flat, all pictures in order), int32 plan [4k], int64 digest [2k].

    A picture of kind 1 has a frame in ``pixels`` (``family/encoded_picture.py``).
    """

    pixels: np.ndarray
    plan: np.ndarray
    digest: np.ndarray


@dataclass
class Picture:
    """One picture on its way, with its ``pixels``, or ``encoded`` until they are needed.

    ``rows`` [tokens, hidden] once they are known, until then in ``parts`` of several forwards, or the ``error`` why
    they never will be: InvalidRequest where the file is at fault.
    """

    key: Hashable
    wire: tuple[int, int, int]
    plan: ImagePlan
    pixels: Pixels | None = None
    encoded: Undecoded | None = None
    parts: list[torch.Tensor] = field(default_factory=list)
    rows: torch.Tensor | None = None
    error: Exception | None = None

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
    plans, digests = item.plan.reshape(-1, _PLAN_LENGTH).tolist(), item.digest.tolist()
    if len(digests) != 2 * len(plans):
        raise InvalidRequest(f"DIGEST has {len(digests)} values for {len(plans)} pictures; it needs 2 each")
    pictures, start = [], 0
    for number, (kind, t, h, w) in enumerate(plans):
        name = f"picture {number}"
        try:
            plan = family.plan_of((t, h, w))
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}: {error}") from None
        picture = Picture((*digests[2 * number : 2 * number + 2], kind, t, h, w), (t, h, w), plan)
        if kind == KIND_ENCODED:
            if decoder is None:
                raise InvalidRequest(
                    f"{name} is encoded, and this vision stage decodes none: set gpu_pixels for both stages or neither"
                )
            file, start = EncodedPicture.read(item.pixels, start, name)
            picture.encoded = file, plan.views
            decoder.check(picture.encoded)
        elif kind == KIND_PIXELS:
            end = start + plan.pixel_bytes
            if end <= item.pixels.size:
                picture.pixels = item.pixels[start:end].reshape(plan.cost, *family.unit_shape)
            start = end
        else:
            raise InvalidRequest(
                f"{name} is of kind {kind}; known are {KIND_PIXELS} (pixels) and {KIND_ENCODED} (a file)"
            )
        pictures.append(picture)
    if start != item.pixels.size:
        raise InvalidRequest(f"PIXELS has {item.pixels.size} bytes; the plan needs {start}")
    return pictures
