"""A picture that travels as its file's bytes, for the vision stage to decode: what preprocess writes into PIXELS.

Tensor PLAN has four int32 for each picture: its kind, then what its family's plan is on the wire. Of kind 0 PIXELS
holds the pixels as the family cuts them; of kind 1 a frame: the file's length in bytes (uint64), its stored width and
height and its EXIF orientation (uint32 each, little-endian), and the file itself.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from tessera.errors import InvalidRequest

KIND_PIXELS, KIND_ENCODED = 0, 1
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
