"""Where tiles lie, from the server's plan and the picture's header."""

from __future__ import annotations

from io import BytesIO

import PIL.Image
import pytest

from tessera_client import InvalidRequest, PicturePlan, ProtocolError
from tessera_gateway.tiles import Tiles, tiles_of, upright_size


def encoded(width: int, height: int, form: str = "JPEG", orientation: int = 1) -> bytes:
    file, exif = BytesIO(), PIL.Image.Exif()
    exif[0x0112] = orientation
    PIL.Image.new("RGB", (width, height)).save(file, form, exif=exif)
    return file.getvalue()


def test_tiles_are_given_row_by_row() -> None:
    assert tiles_of(PicturePlan(0, 3, 1, 2), (100, 40)) == Tiles(100, 40, ((0, 0, 50, 40), (50, 0, 50, 40)), True)
    assert tiles_of(PicturePlan(1, 1, 1, 1), (100, 40)) == Tiles(100, 40, ((0, 0, 100, 40),), False)
    grid = tiles_of(PicturePlan(0, 4, 2, 2), (100, 40))
    assert [tile[:2] for tile in grid.tiles] == [(0, 0), (50, 0), (0, 20), (50, 20)] and not grid.thumbnail


@pytest.mark.parametrize("size", [(100, 7), (5, 3), (1, 1), (1023, 769)])
def test_tiles_cover_a_picture_that_does_not_divide_evenly(size: tuple[int, int]) -> None:
    cut = tiles_of(PicturePlan(0, 13, 3, 4), size)
    assert len(cut.tiles) == 12
    assert sum(width * height for _, _, width, height in cut.tiles) == size[0] * size[1]
    for (x, _, width, _), (right, _, _, _) in zip(cut.tiles[:3], cut.tiles[1:4]):
        assert x + width == right


@pytest.mark.parametrize("plan", [(1, 36, 52), (9, 2, 3), (5, 2, 3), (0, 0, 0)])
def test_a_plan_that_is_no_grid_is_refused(plan: tuple[int, int, int]) -> None:
    with pytest.raises(ProtocolError, match="does not cut pictures into tiles"):
        tiles_of(PicturePlan(0, *plan), (100, 100))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_the_size_is_that_of_the_upright_picture(form: str, orientation: int) -> None:
    assert upright_size(encoded(30, 20, form, orientation)) == ((20, 30) if orientation >= 5 else (30, 20))


def test_damaged_metadata_turns_nothing() -> None:
    assert upright_size(encoded(30, 20, orientation=6).replace(b"MM\0*", b"MM\0?")) == (30, 20)


def test_no_pixel_is_decoded() -> None:
    without_pixels = encoded(30, 20, "PNG").partition(b"IDAT")[0] + b"IDAT"
    assert upright_size(without_pixels) == (30, 20)


@pytest.mark.parametrize("data", [b"", b"no picture", encoded(30, 20)[:20]])
def test_what_has_no_size_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="size cannot be read"):
        upright_size(data)
