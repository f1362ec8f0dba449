"""The size of a picture, from its header alone."""

from __future__ import annotations

from io import BytesIO

import PIL.Image
import pytest

from tessera_client import InvalidRequest
from tessera_gateway.page import upright_size


def encoded(width: int, height: int, form: str = "JPEG", orientation: int = 1) -> bytes:
    file, exif = BytesIO(), PIL.Image.Exif()
    exif[0x0112] = orientation
    PIL.Image.new("RGB", (width, height)).save(file, form, exif=exif)
    return file.getvalue()


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
