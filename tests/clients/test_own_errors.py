"""Whatever is wrong with what a caller gives, or with who answers: the error is one of the SDK's own tree."""

from __future__ import annotations

import asyncio
import io
import os
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_transport import FakeTransport

from tessera_client import AsyncClient, Client, InvalidRequest, ProtocolError
from tessera_client.messages import chat_request, question_request

ORIENTATION = 0x0112


def jpeg(**options: Any) -> bytes:
    image = pytest.importorskip("PIL.Image").fromarray(
        np.random.default_rng(3).integers(0, 256, (24, 40, 3), np.uint8), "RGB"
    )
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95, **options)
    return file.getvalue()


def truncated() -> Any:
    import PIL.Image

    whole = jpeg()
    return PIL.Image.open(io.BytesIO(whole[: len(whole) // 2]))


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


DAMAGED = {
    "truncated": truncated,
    "closed": closed_file,
    "nul": lambda: "ro\0om.jpg",
    "bytes path": lambda: Path(b"room".decode()) / "\0",
    "read fails": Unreadable,
    "array fails": NoArray,
    "ragged": lambda: np.array([1, "a"], object),
    "surrogate path": lambda: "\ud800.jpg",
    "surrogate data": lambda: "data:image/png;base64,\ud800",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_one_damaged_picture_among_many_is_returned_in_its_place(name: str) -> None:
    items = [(b"jpeg", "a"), (DAMAGED[name](), "b"), (b"jpeg", "c"), 5, (b"jpeg", "d")]
    results = list(Client(transport=FakeTransport()).ask_many(items, errors="return"))  # type: ignore[arg-type]
    assert [isinstance(result, InvalidRequest) for result in results] == [False, True, False, True, False]
    assert results[4].text == "answer to d"


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.chat([{"role": "user", "content": None}]),
        lambda client: client.chat([{"role": "user", "content": 5}]),
        lambda client: client.chat(None),
        lambda client: client.chat([{"role": "user", "content": [{"type": "image"}]}], Unreadable()),
        lambda client: client.chat([{"role": "user", "content": "\ud800"}]),
        lambda client: client.ask(None, "lone \udfff"),
        lambda client: client.ask(None, "q", stop=["\ud800"]),
        lambda client: client.ask(None, "q", tile_policy=5),
        lambda client: client.ask(None, "q", timeout="soon"),
        lambda client: client.ask(None, "q", timeout=float("nan")),
        lambda client: client.ask(None, "q", timeout=float("inf")),
        lambda client: client.stream(None, "q", timeout="soon"),
        lambda client: list(client.ask_many([], concurrency=0)),
        lambda client: list(client.ask_many([], concurrency="many")),
        lambda client: list(client.ask_many([], errors="retrun")),
        lambda client: list(client.ask_many(5)),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(call: Any) -> None:
    fake = FakeTransport()
    with pytest.raises(InvalidRequest):
        call(Client(transport=fake))
    assert not fake.requests


@pytest.mark.parametrize(
    "url", [5, None, [], [5], "", "a:1,", "a:1,ftp://b", "http://[::1", "host:port", "a:99999", b"host:1", "ho st:1"]
)
@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_what_is_no_address_is_refused(make: Any, url: Any) -> None:
    with pytest.raises(InvalidRequest, match="server address"):
        make(url)


@pytest.fixture(params=[b"<html>It works!</html>", b"[1, 2]", b'"text"', b"{}", b"\xff\xfe", b"[" * 9999])
def other_web_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """Answers everything with 200 and the same page. A connection on which nothing comes must not hold its end back."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", str(len(request.param)))
            self.end_headers()
            self.wfile.write(request.param)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{listener.server_address[1]}"
        listener.shutdown()
        thread.join()


def test_another_web_server_is_a_protocol_error(other_web_server: str) -> None:
    with Client(other_web_server) as client:
        assert not client.ready()
        for call in (client.status, lambda: client.ask(None, "q"), lambda: client.stream(None, "q").answer()):
            with pytest.raises(ProtocolError):
                call()

    async def run() -> None:
        async with AsyncClient(other_web_server) as client:
            assert not await client.ready()
            with pytest.raises(ProtocolError):
                await client.status()

    asyncio.run(run())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_pillow_image_is_as_upright_as_its_file(orientation: int, tmp_path: Path) -> None:
    """The server turns an encoded file by its EXIF; pixels that leave without it have to be turned here."""
    import PIL.Image
    import PIL.ImageOps

    exif = PIL.Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / "turned.jpg"
    path.write_bytes(jpeg(exif=exif))
    with PIL.Image.open(path) as image:
        expected = np.asarray(PIL.ImageOps.exif_transpose(image))
        (sent,) = question_request(image, "q").images
    with PIL.Image.open(io.BytesIO(sent)) as arrived:
        assert arrived.getexif().get(ORIENTATION, 1) == 1
        assert np.array_equal(np.asarray(arrived), expected)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_a_pillow_image_of_any_mode_arrives(mode: str) -> None:
    import PIL.Image

    (sent,) = question_request(PIL.Image.new(mode, (5, 4)), "q").images
    with PIL.Image.open(io.BytesIO(sent)) as arrived:
        assert arrived.size == (5, 4) and arrived.format == "PNG"
    with pytest.raises(InvalidRequest, match="mode 'F'"):
        question_request(PIL.Image.new("F", (5, 4)), "q")


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


def test_a_pipe_is_read_once_and_then_refused() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"jpeg")
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert question_request(pipe, "q").images == (b"jpeg",)
        with pytest.raises(InvalidRequest, match="end"):
            question_request(pipe, "q")
