"""Which way up a picture is: EXIF and XMP in every form that Pillow's exif_transpose knows, against Pillow."""

from __future__ import annotations

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


def tiff(kind: int, value: bytes, count: int = 1, order: str = "<", tag: int = 0x0112) -> bytes:
    """An EXIF block of one entry, whose ``value`` is padded to four bytes."""
    entry = struct.pack(order + "HHI", tag, kind, count) + value.ljust(4, b"\0")
    return struct.pack(order + "2sHIH", b"II" if order == "<" else b"MM", 42, 8, 1) + entry + bytes(4)


def xmp(orientation: int, form: str = "attribute") -> bytes:
    inner = (
        f'tiff:Orientation="{orientation}">'
        if form == "attribute"
        else (f"><tiff:Orientation>{orientation}</tiff:Orientation>")
    )
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


def with_jpeg_segment(data: bytes, body: bytes, at: int = 2) -> bytes:
    return data[:at] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + data[at:]


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("form", ["attribute", "element"])
@pytest.mark.parametrize("kind", KINDS)
def test_xmp(kind: str, form: str, orientation: int) -> None:
    assert agrees(file(kind, packet=xmp(orientation, form))) == (2 <= orientation <= 8)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_exif(kind: str, orientation: int) -> None:
    assert agrees(file(kind, tiff(3, bytes([orientation])))) == (orientation > 1)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(("number", "form"), [(3, "H"), (4, "I"), (8, "h"), (9, "i")])
@pytest.mark.parametrize("kind", KINDS)
def test_exif_of_every_whole_number(kind: str, number: int, form: str, order: str) -> None:
    assert agrees(file(kind, tiff(number, struct.pack(order + form, 6), order=order)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stated", [1, 0, 9, 3])
def test_exif_goes_before_xmp(kind: str, stated: int) -> None:
    assert agrees(file(kind, tiff(3, struct.pack("<H", stated)), xmp(6))) == (stated == 3)


@pytest.mark.parametrize("kind", KINDS)
def test_xmp_counts_where_exif_states_no_orientation(kind: str) -> None:
    assert agrees(file(kind, tiff(3, b"\1", tag=0x0128), xmp(6)))


def test_several_exif_blocks_of_a_jpeg_are_one() -> None:
    plain = file("JPEG")
    six, three = (b"Exif\0\0" + tiff(3, struct.pack("<H", value)) for value in (6, 3))
    assert agrees(with_jpeg_segment(with_jpeg_segment(plain, three), six))  # the first counts
    assert np.array_equal(
        decode(with_jpeg_segment(with_jpeg_segment(plain, three), six)), decode(with_jpeg_segment(plain, six))
    )
    assert agrees(with_jpeg_segment(with_jpeg_segment(plain, six[:6] + six[20:]), six[:20]))  # one block in two parts


def test_the_last_xmp_packet_of_a_jpeg_counts() -> None:
    head = b"http://ns.adobe.com/xap/1.0/\0"
    assert agrees(with_jpeg_segment(with_jpeg_segment(file("JPEG"), head + xmp(8)), head + xmp(3)))


@pytest.mark.parametrize("after", [b"IHDR", b"IDAT"])
def test_png_texts(after: bytes) -> None:
    """Compressed XMP, and ImageMagick's EXIF in hexadecimal, before and after the pixels."""
    plain, exif = file("PNG"), b"Exif\0\0" + tiff(3, b"\6")
    profile = f"\nexif\n{len(exif):8}\n{exif.hex()}\n".encode()
    assert agrees(with_png_chunk(plain, b"zTXt", b"XML:com.adobe.xmp\0\0" + zlib.compress(xmp(6)), after))
    packed = b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp(6))
    assert agrees(with_png_chunk(plain, b"iTXt", packed, after))
    assert agrees(with_png_chunk(plain, b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(profile), after))
    assert agrees(with_png_chunk(plain, b"tEXt", b"Raw profile type exif\0" + profile, after))
    assert agrees(with_png_chunk(with_png_chunk(plain, b"eXIf", tiff(3, b"\3"), after), b"eXIf", tiff(3, b"\6"), after))


def test_a_text_bomb_costs_no_more_than_its_limit() -> None:
    bomb = zlib.compress(bytes(1 << 28), 9)
    plain = file("PNG")
    for _ in range(20):
        plain = with_png_chunk(plain, b"zTXt", b"XML:com.adobe.xmp\0\0" + bomb)
    with pytest.raises(InvalidRequest, match="too large"):  # as Pillow
        pictures.probe_size(plain)


def test_metadata_that_vp8x_does_not_announce_is_none() -> None:
    data = bytearray(file("WEBP", tiff(3, b"\6"), xmp(6)))
    assert agrees(bytes(data))
    data[20] &= ~0x08
    assert agrees(bytes(data))  # XMP alone
    data[20] &= ~0x04
    assert not agrees(bytes(data))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [b"", b"II", b"II*\0\xff\xff\xff\xff", tiff(3, b"\6")[:-6], tiff(3, b"\6")[:12]])
def test_damaged_exif_turns_nothing(kind: str, block: bytes) -> None:
    found = decode(file(kind, block.ljust(9, b"\0")))
    assert np.array_equal(found, decode(file(kind)))
