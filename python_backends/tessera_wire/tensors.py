"""Tensors as the protocol carries them: raw little-endian contents.

A BYTES tensor is each element behind its length as a little-endian uint32; BOOL is one byte, INT32 and FP32 four.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple


class Tensor(NamedTuple):
    """One input: ``data`` holds the raw contents."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


def bytes_tensor(name: str, *elements: bytes) -> Tensor:
    """A BYTES tensor of one dimension."""
    data = b"".join(piece for element in elements for piece in (len(element).to_bytes(4, "little"), element))
    return Tensor(name, "BYTES", (len(elements),), data)


def elements(data: bytes) -> Iterator[bytes]:
    """The elements of a BYTES tensor's raw contents. Raises struct.error where a length is cut off."""
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        yield data[at + 4 : at + 4 + length]
        at += 4 + length
