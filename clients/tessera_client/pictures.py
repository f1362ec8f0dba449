"""A picture in any form a caller may have, as the encoded bytes that the server takes."""

import base64
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, BinaryIO

from tessera_wire.errors import InvalidRequest

Image = Any
"""A picture in any of these forms:

- a path (``str`` or ``Path``) to a JPEG, PNG or WebP file (no pipe, device or folder);
- its encoded bytes, or a ``data:`` URL;
- an open binary file, which is left where it was found;
- a numpy array, uint8 [height, width, 3], RGB, or a Pillow image: sent as PNG (needs Pillow here), those of whole
  numbers ("I", "I;16") as 16-bit grey.

Files and bytes are sent as they are; the server decodes them.
"""

LARGEST_REQUEST = 64 << 20
"""Bytes that a server takes of all pictures of a request together, if it is not set to others."""
PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")  # Pillow's names of what a PNG can hold
_FILES = threading.Lock()  # one file may be given in several requests at once


def encode_images(images: Iterable[Image]) -> list[bytes]:
    """As :func:`encode_image`, of all pictures of a request."""
    encoded: list[bytes] = []
    for image in images:
        add_image(encoded, image)
    return encoded


def add_image(encoded: list[bytes], image: Image) -> None:
    """Adds a picture to those of its request, which leave it the rest of the bytes that a request may have."""
    encoded.append(encode_image(image, LARGEST_REQUEST - sum(map(len, encoded))))


def encode_image(image: Image, room: int = LARGEST_REQUEST) -> bytes:
    """The encoded bytes of a picture, whatever form of :data:`Image` it has. Raises InvalidRequest and nothing else.

    A file at a path is looked at before it is read, and may have ``room`` bytes; what is in memory or open already is
    the server's to refuse.
    """
    try:
        data = _encoded(image, room)
    except InvalidRequest:
        raise
    except Exception as error:  # a caller's file or array may raise anything
        what = f"picture {image!r:.200}" if isinstance(image, (str, os.PathLike)) else f"{type(image).__name__} picture"
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"cannot read the {what}: {reason or type(error).__name__}") from error
    if not data:
        at_end = "; is the file at its end?" if hasattr(image, "read") else ""
        raise InvalidRequest(f"the picture has zero bytes{at_end}")
    return data


def from_data_url(url: str) -> bytes:
    """The bytes in a ``data:...;base64,...`` URL. Raises InvalidRequest."""
    header, comma, body = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise InvalidRequest(f"not a base64 data: URL: {url[:40]!r}...", "use data:image/jpeg;base64,<text>")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise InvalidRequest(f"the data: URL {url[:40]!r}... holds invalid base64: {error}") from error


def _encoded(image: Image, room: int) -> bytes:
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if isinstance(image, str) and image.startswith("data:"):
        return from_data_url(image)
    if isinstance(image, (str, os.PathLike)):
        return _read_path(image, room)
    pillow = sys.modules.get("PIL.Image")  # imported already if there is one of its images
    if pillow is not None and isinstance(image, pillow.Image):
        return _encode_pillow(image)
    if hasattr(image, "__array_interface__") or hasattr(image, "__array__"):
        return _encode_pixels(image)
    if hasattr(image, "read"):
        return _read(image)
    raise InvalidRequest(
        f"a picture cannot be a {type(image).__name__}", "give a path, bytes, an open file or an RGB uint8 array"
    )


def open_checked(path: str | os.PathLike[str], check: Callable[[os.stat_result], None]) -> BinaryIO:
    """Opens a file to which ``check`` has no objection, by its name and once it is open, for another may have taken its
    place. Does not wait for a pipe."""
    check(os.stat(path))
    file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb")
    try:
        check(os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def _read_path(path: str | os.PathLike[str], room: int) -> bytes:
    """A regular file's bytes. A pipe would be waited for, a device never ends, and a large file fills the memory."""
    name = f"{os.fspath(path)!r:.200}"
    with open_checked(path, partial(_check_file, name, room=room)) as opened:
        data = opened.read(max(room, 0) + 1)
        if len(data) > room:  # it grows
            raise _too_large(f"{name} has more than {max(room, 0)} bytes", room)
        return data


def _check_file(name: str, about: os.stat_result, room: int) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise InvalidRequest(f"{name} is {kind_of(about.st_mode)}, not a picture's file")
    if about.st_size > room:
        raise _too_large(f"{name} has {about.st_size} bytes", room)


def kind_of(mode: int) -> str:
    """What a path leads to that is no regular file, by its ``st_mode``."""
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _too_large(what: str, room: int) -> InvalidRequest:
    beside = "" if room == LARGEST_REQUEST else f", of which the pictures before it leave {max(room, 0)}"
    return InvalidRequest(f"{what}; a request may have {LARGEST_REQUEST}{beside}", "make it smaller")


def _read(file: Any) -> bytes:
    """What is left in the file, which stays left in it, so that it can be sent again."""
    with _FILES:
        start = file.tell() if hasattr(file, "seekable") and file.seekable() else None
        data = file.read()
        if start is not None:
            file.seek(start)
    if not isinstance(data, bytes):
        raise InvalidRequest("the picture's file must be opened in binary mode ('rb')")
    return data


def _encode_pillow(image: Any) -> bytes:
    """Upright, as the server makes an encoded file, whose orientation would be lost here."""
    from io import BytesIO

    import PIL.ImageOps

    if image.mode == "F":
        raise InvalidRequest("a Pillow image of mode 'F' has no range of brightness", "convert it to 'L' or 'RGB'")
    upright = PIL.ImageOps.exif_transpose(image)
    if upright.mode not in PNG_MODES:
        upright = _grey_16(upright) if upright.mode.startswith("I") else upright.convert("RGB")
    file = BytesIO()
    upright.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _grey_16(image: Any) -> Any:
    """The same numbers in the one mode of whole numbers that a PNG holds; Pillow would clip them at 255 elsewhere."""
    whole = image if image.mode == "I" else image.convert("I")
    least, most = whole.getextrema()
    if least < 0 or most > 0xFFFF:
        raise InvalidRequest(
            f"a Pillow image of mode {image.mode!r} that holds {least}..{most} has no range of brightness: whole "
            "numbers are taken from 0 to 65535",
            "scale it, and convert it to 'L'",
        )
    return whole.convert("I;16")


def _encode_pixels(image: Any) -> bytes:
    import numpy as np

    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise InvalidRequest(
            f"an array picture must be uint8 [height, width, 3] RGB, got {pixels.dtype} {list(pixels.shape)}"
        )
    import PIL.Image

    return _encode_pillow(PIL.Image.fromarray(pixels))
