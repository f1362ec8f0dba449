"""Where a picture's tiles lie on it: the server's plan in the picture's own pixels."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise

from PIL import Image, UnidentifiedImageError

from tessera_client import InvalidRequest, PicturePlan, ProtocolError

ORIENTATION = 0x0112  # EXIF's tag; from 5 on the picture lies on its side


@dataclass(frozen=True)
class Tiles:
    """``tiles``: (x, y, width, height) of each, row by row, in pixels of the upright picture of ``width`` x ``height``.

    ``thumbnail``: whether the model also sees the whole picture once, as one more tile.
    """

    width: int
    height: int
    tiles: tuple[tuple[int, int, int, int], ...]
    thumbnail: bool


def tiles_of(plan: PicturePlan, size: tuple[int, int]) -> Tiles:
    """The tiles of a picture of ``size``, (width, height).

    The server stretches a picture to its grid, so a tile's share of the picture is its share of the grid, rounded to
    whole pixels. Raises ProtocolError for a plan that is no grid of tiles.
    """
    count, rows, columns = plan.t, plan.h, plan.w
    if rows < 1 or columns < 1 or count - rows * columns not in (0, 1):
        raise ProtocolError("this server's model does not cut pictures into tiles")
    width, height = size
    across = [round(width * column / columns) for column in range(columns + 1)]
    down = [round(height * row / rows) for row in range(rows + 1)]
    tiles = tuple(
        (left, top, right - left, bottom - top) for top, bottom in pairwise(down) for left, right in pairwise(across)
    )
    return Tiles(width, height, tiles, thumbnail=count > rows * columns)


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
