"""Pictures that travel encoded, decoded and cut on the GPU inside the vision process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tessera.errors import InvalidRequest
from tessera.family.encoded_picture import LEAST_SIDE, EncodedPicture
from tessera.vision.jpeg_planes import peak_bytes, tiles_of_planes
from tessera.vision.nvjpeg import OWN_BYTES, NvJpeg


@dataclass(frozen=True)
class Cut:
    """How a picture becomes tiles of ``side`` pixels: a grid of ``columns`` x ``rows``, and a thumbnail or not."""

    picture: EncodedPicture
    side: int
    columns: int
    rows: int
    thumbnail: bool

    @property
    def peak_bytes(self) -> int:
        """Bytes of the GPU's memory that decoding and cutting takes at most, the tiles included; known before."""
        width, height = self.picture.upright_size
        return OWN_BYTES * width * height + peak_bytes(width, height, self.side, self.columns, self.rows)


class TileDecoder(Protocol):
    """An encoded picture -> uint8 tiles [t, side, side, 3] on the runner's device. Raises InvalidRequest."""

    def tiles(self, cut: Cut) -> torch.Tensor: ...


def make_decoder(name: str, device: str) -> TileDecoder | None:
    """By its name in the settings; raises ConfigError where its library is missing."""
    return GpuPictures(device) if name == "nvjpeg" else None


class GpuPictures:
    """nvJPEG's planes, then torch."""

    def __init__(self, device: str = "cuda") -> None:
        self._nvjpeg = NvJpeg(device)

    @torch.inference_mode()
    def tiles(self, cut: Cut) -> torch.Tensor:
        """Raises InvalidRequest where the file cannot be decoded or is not what its frame states."""
        data, across, down = cut.picture.data, cut.picture.width, cut.picture.height
        sizes = self._nvjpeg.sizes(data)
        if min(across, down) < LEAST_SIDE:
            raise InvalidRequest(f"it is {across}x{down} pixels; from {LEAST_SIDE} on each side the GPU decodes")
        halves = ((across, down), (-(-across // 2), down), (-(-across // 2), -(-down // 2)))
        if sizes not in [[(across, down), chroma, chroma] for chroma in halves]:
            raise InvalidRequest(
                f"its planes are {sizes}; announced were those of a YCbCr JPEG of {across}x{down} pixels, its chroma "
                "4:4:4, 4:2:2 or 4:2:0"
            )
        planes = self._nvjpeg.planes(data)
        return tiles_of_planes(planes, cut.picture.orientation, cut.side, cut.columns, cut.rows, cut.thumbnail)
