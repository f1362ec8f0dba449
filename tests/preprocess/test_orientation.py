"""Which way up a picture is: EXIF and XMP in every form that Pillow's exif_transpose knows, against Pillow."""

import io
import struct
import zlib

import encoded_pictures as pictures
import numpy as np
import pytest
from PIL import Image

from tessera.errors import InvalidRequest
from tessera.preprocess.decode import decode

STORED = pictures.smooth(48, 32)
KINDS = ["JPEG", "PNG", "WEBP"]


def agrees(data: bytes) -> bool:
    """Whether we turn the file as Pillow does; its orientation makes a difference to the pixels."""
    expected = pictures.by_pillow(data)
    assert np.array_equal(decode(data), expected)
    assert pictures.probe_size(data) == expected.shape[1::-1]
    return not np.array_equal(expected, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def tiff(value: int) -> bytes:
    """An EXIF block of one entry, the orientation."""
    entry = struct.pack("<HHII", 0x0112, 3, 1, value)
    return struct.pack("<2sHIH", b"II", 42, 8, 1) + entry + bytes(4)


def xmp(orientation: int) -> bytes:
    inner = f'tiff:Orientation="{orientation}">'
    return f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description {inner}</rdf:Description></x:xmpmeta>'.encode()


def file(kind: str, exif: bytes = b"", packet: bytes = b"") -> bytes:
    options = {"exif": b"Exif\0\0" + exif} if exif else {}
    if packet and kind != "PNG":
        options["xmp"] = packet
    data = pictures.saved(Image.fromarray(STORED), kind, **options)
    return with_png_chunk(data, b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + packet) if packet and kind == "PNG" else data


def with_png_chunk(data: bytes, kind: bytes, body: bytes, after: bytes = b"IHDR") -> bytes:
    at = data.index(after) - 4
    at += 12 + struct.unpack_from(">I", data, at)[0]
    return (
        data[:at] + struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) + data[at:]
    )


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_exif_and_xmp(kind: str, orientation: int) -> None:
    """EXIF's counts where both state one that is an orientation."""
    turned = 2 <= orientation <= 8
    assert agrees(file(kind, tiff(orientation))) == turned
    assert agrees(file(kind, packet=xmp(orientation))) == turned
    assert agrees(file(kind, tiff(orientation), xmp(6))) == turned


@pytest.mark.parametrize("after", [b"IHDR", b"IDAT"])
def test_png_texts(after: bytes) -> None:
    """Compressed XMP, and ImageMagick's EXIF in hexadecimal, before and after the pixels."""
    plain, exif = file("PNG"), b"Exif\0\0" + tiff(6)
    profile = f"\nexif\n{len(exif):8}\n{exif.hex()}\n".encode()
    assert agrees(with_png_chunk(plain, b"zTXt", b"XML:com.adobe.xmp\0\0" + zlib.compress(xmp(6)), after))
    packed = b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp(6))
    assert agrees(with_png_chunk(plain, b"iTXt", packed, after))
    assert agrees(with_png_chunk(plain, b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(profile), after))
    assert agrees(with_png_chunk(plain, b"tEXt", b"Raw profile type exif\0" + profile, after))
    assert agrees(with_png_chunk(with_png_chunk(plain, b"eXIf", tiff(3), after), b"eXIf", tiff(6), after))


def test_a_text_bomb_costs_no_more_than_its_limit() -> None:
    bomb = zlib.compress(bytes(1 << 28), 9)
    plain = file("PNG")
    for _ in range(20):
        plain = with_png_chunk(plain, b"zTXt", b"XML:com.adobe.xmp\0\0" + bomb)
    with pytest.raises(InvalidRequest, match="too large"):  # as Pillow
        pictures.probe_size(plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [b"", b"II", b"II*\0\xff\xff\xff\xff", tiff(6)[:-6], tiff(6)[:12]])
def test_damaged_exif_turns_nothing(kind: str, block: bytes) -> None:
    found = decode(file(kind, block.ljust(9, b"\0")))
    assert np.array_equal(found, decode(file(kind)))
