"""The size of an encoded picture as people see it."""

from __future__ import annotations

from io import BytesIO

from PIL import Image, UnidentifiedImageError

from tessera_client import InvalidRequest

ORIENTATION = 0x0112  # EXIF's tag; from 5 on the picture lies on its side


def upright_size(picture: bytes) -> tuple[int, int]:
    """(width, height) as people see the encoded picture, from its header alone. Raises InvalidRequest."""
    try:
        with Image.open(BytesIO(picture)) as header:
            (width, height), on_its_side = header.size, _orientation(header) >= 5
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise InvalidRequest(f"the picture's size cannot be read: {error}") from None
    return (height, width) if on_its_side else (width, height)


def _orientation(header: Image.Image) -> int:
    """1 to 8. A PNG's own getexif would decode it."""
    try:
        return int(Image.Image.getexif(header).get(ORIENTATION, 1))
    except Exception:  # damaged metadata, which raises all sorts, turns nothing; nor does it for the server
        return 1
