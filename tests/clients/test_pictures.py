"""Pictures in any form a caller has, as the bytes that are sent; what is wrong with them is an SDK error."""

import base64
import io
import os
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from fake_transport import FakeTransport

from tessera.settings.stages import Limits
from tessera_client import Client, InvalidRequest
from tessera_client.messages import chat_request, question_request
from tessera_client.pictures import LARGEST_REQUEST, encode_image


def test_pictures_from_path_bytes_file_and_data_url(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"jpeg")
    url = "data:image/jpeg;base64," + base64.b64encode(b"jpeg").decode()
    for image in (path, str(path), b"jpeg", bytearray(b"jpeg"), io.BytesIO(b"jpeg"), url):
        assert encode_image(image) == b"jpeg"
    assert question_request([path, b"png"], "q").images == (b"jpeg", b"png")
    assert question_request(None, "q").images == ()


def decoded(picture: bytes) -> np.ndarray:
    with PIL.Image.open(io.BytesIO(picture)) as image:
        assert image.format == "PNG" and image.getexif().get(0x0112, 1) == 1
        return np.asarray(image)


@pytest.mark.parametrize("mode", ["1", "LA", "P", "RGBA", "CMYK"])
def test_a_pillow_image_of_any_mode_arrives(mode: str) -> None:
    assert decoded(encode_image(PIL.Image.new(mode, (5, 4)))).shape[:2] == (4, 5)


@pytest.mark.parametrize("mode", ["I", "I;16", "I;16B", "I;16L"])
@pytest.mark.parametrize("value", [300, 65535])
def test_whole_numbers_of_pillow_arrive_as_they_are(mode: str, value: int) -> None:
    """None is clipped at 255, as Pillow's conversion to 8 bits would; what they mean is the server's to say."""
    assert (decoded(encode_image(PIL.Image.new(mode, (4, 3), value))) == np.full((3, 4), value)).all()


def test_a_pillow_image_is_as_upright_as_its_file() -> None:
    """The server turns an encoded file by its EXIF; pixels that leave without it have to be turned here."""
    with PIL.Image.open(io.BytesIO(jpeg(orientation=6))) as image:
        upright = np.asarray(PIL.ImageOps.exif_transpose(image))
        assert np.array_equal(decoded(encode_image(image)), upright)
    assert np.array_equal(decoded(encode_image(upright)), upright)  # an array


def jpeg(orientation: int = 1) -> bytes:
    exif, file = PIL.Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    pixels = np.random.default_rng(3).integers(0, 256, (24, 40, 3), np.uint8)
    PIL.Image.fromarray(pixels).save(file, "JPEG", quality=95, exif=exif)
    return file.getvalue()


def truncated() -> Any:
    return PIL.Image.open(io.BytesIO(jpeg()[:900]))


def closed_file() -> Any:
    file = io.BytesIO(b"jpeg")
    file.close()
    return file


class Unreadable:
    def read(self) -> bytes:
        raise RuntimeError("the camera is gone")


class NoArray:
    def __array__(self, *_: Any) -> Any:
        raise struct.error("cut off")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: np.zeros((4, 4), np.uint8), r"uint8 \[4, 4\]"),
        (lambda: np.zeros((4, 4, 3), np.float32), "float32"),
        (lambda: b"", "zero bytes"),
        (lambda: "nowhere.jpg", "nowhere.jpg"),
        (lambda: "ro\0om.jpg", "cannot read the picture"),
        (lambda: "data:image/png,xx", "base64"),
        (lambda: "data:image/png;base64,@@", "invalid base64"),
        (lambda: io.StringIO("text"), "binary mode"),
        (lambda: 17, "cannot be a int"),
        (lambda: PIL.Image.new("F", (5, 4)), "mode 'F'"),
        (lambda: PIL.Image.new("I", (4, 3), -1), "mode 'I' that holds -1..-1 has no range of brightness"),
        (truncated, "truncated"),
        (closed_file, "closed file"),
        (Unreadable, "the camera is gone"),
        (NoArray, "cut off"),
    ],
)
def test_what_is_no_picture_is_refused(make: Any, words: str) -> None:
    """Also among many, in its place."""
    items = [(b"jpeg", "a"), (make(), "b"), (b"jpeg", "c"), 5, (b"jpeg", "d")]
    results = list(Client(transport=FakeTransport()).ask_many(items, errors="return"))  # type: ignore[arg-type]
    assert [isinstance(result, InvalidRequest) for result in results] == [False, True, False, True, False]
    assert results[4].text == "answer to d"
    with pytest.raises(InvalidRequest, match=words):
        raise results[1]


def test_a_path_is_looked_at_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    with open(tmp_path / "large.jpg", "wb") as file:
        file.truncate(LARGEST_REQUEST + 1)
    (tmp_path / "small.jpg").write_bytes(b"jpeg")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.jpg"))
        for name, words in (
            ("pipe.jpg", "is a pipe, not a picture's file"),
            ("socket.jpg", "is a socket"),
            ("", "is a folder"),
            ("large.jpg", f"has {LARGEST_REQUEST + 1} bytes; a request may have {LARGEST_REQUEST}"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                encode_image(tmp_path / name)
    with pytest.raises(InvalidRequest, match="of which the pictures before it leave 3"):
        chat_request([{"role": "user", "content": "?"}], [bytes(LARGEST_REQUEST - 3), tmp_path / "small.jpg"])


def test_the_limit_of_a_request_is_the_servers() -> None:
    assert Limits().max_request_bytes == LARGEST_REQUEST


def test_an_open_file_is_the_same_picture_every_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"head jpeg")
    with open(path, "rb") as file:
        file.seek(5)
        client, fake = Client(transport=(fake := FakeTransport())), fake
        for answer in client.ask_many([(file, "q")] * 40, concurrency=8):
            assert answer.text
        assert {request.images for request, *_ in fake.requests} == {(b"jpeg",)} and file.tell() == 5
        assert chat_request([{"role": "user", "content": [{"type": "image"}]}], [file]).images == (b"jpeg",)
        file.read()
        with pytest.raises(InvalidRequest, match="end"):
            question_request(file, "q")
