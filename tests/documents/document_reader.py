"""A model that reads documents, as a transport without a network, and the documents it can read.

On its pages stand bars of one colour each. It answers MinerU's prompts in its model's grammar: the same layout of a
title, a text and a table for each page, and for a crop the name of the colour in it.
"""

import io
import json
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from clients.fake_transport import FakeTransport, final
from PIL import Image, ImageDraw

from tessera_client.messages import Request
from tessera_client.transports import Deliver, Sent
from tessera_documents import TesseraVlmClient, mineru_client
from tessera_documents.vlm_client import known_page

COLORS = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255), "black": (0, 0, 0), "white": (255, 255, 255)}
BOXES = {"title": (100, 50, 900, 150), "text": (100, 200, 900, 600), "table": (100, 650, 900, 900)}
"""Of each page, in thousandths of its width and height."""
LAYOUT = "\n".join(
    "<|box_start|>{:03} {:03} {:03} {:03}<|box_end|><|ref_start|>{}<|ref_end|><|rotate_up|>".format(*box, kind)
    for kind, box in BOXES.items()
)
PAGE = (612, 792)  # points
Bars = Sequence[str]
"""The colours of a page's three bars, from its top."""
FIRST, SECOND, THIRD = ("red", "green", "blue"), ("black", "red", "green"), ("blue", "black", "red")


class DocumentReader(FakeTransport):
    """Answers at once; ``layout``: what it says of each page, ``known``: of the one that shows whether it can read.
    Questions whether it is there and can read are not noted."""

    def __init__(self, layout: str = LAYOUT, known: str = LAYOUT) -> None:
        super().__init__()
        self.layout, self.known = layout, known

    def send(self, request: Request, request_id: str, timeout: float | None, deliver: Deliver) -> Sent:
        if isinstance(self._status, Exception):
            deliver(self._status)
        elif request.messages is None:
            _give(deliver, final("Hi"))
        elif "Layout" in request.messages and request.images[0] == _known_page():
            _give(deliver, final(self.known))
        else:
            return self.take(request, request_id, timeout, deliver)
        return Sent(lambda: None, lambda: None)

    def take(self, request: Request, request_id: str, timeout: float | None, deliver: Deliver) -> Sent:
        """A question about a page of the job's."""
        return super().send(request, request_id, timeout, deliver)

    def answer_to(self, request: Request) -> Sequence[Any]:
        prompt = json.loads(request.messages or "")[-1]["content"][-1]["text"].strip()
        if prompt == "Layout Detection:":
            return [final(self.layout)]
        color = seen(request.images[0])
        return [final(f"<fcel>{color}<fcel>b<nl>" if prompt == "Table Recognition:" else f"{color} words")]

    @property
    def layouts_and_crops(self) -> str:
        """What was asked for in turn: an L for a page's layout, a c for a crop."""
        return "".join("L" if "Layout Detection" in (request.messages or "") else "c" for request, *_ in self.requests)

    @property
    def pages_asked(self) -> int:
        return self.layouts_and_crops.count("L")


class Together(DocumentReader):
    """Holds its answers until as many requests wait as ``sizes`` says next, then gives them, the last one first."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self._sizes = list(sizes)
        self._waiting: list[tuple[Request, Deliver]] = []
        self._turn = threading.Lock()

    def take(self, request: Request, request_id: str, timeout: float | None, deliver: Deliver) -> Sent:
        self.requests.append((request, request_id, timeout))
        with self._turn:
            self._waiting.append((request, deliver))
            together = self._waiting if len(self._waiting) == self._sizes[0] else []
            if together:
                del self._sizes[0]
                self._waiting = []
        for each, give in reversed(together):
            give(self.answer_to(each)[0])
            give(None)
        return Sent(lambda: None, lambda: None)


def _give(deliver: Deliver, answer: Any) -> None:
    deliver(answer)
    deliver(None)


@cache
def _known_page() -> bytes:
    """As MinerU's client sends it."""
    asked: list[bytes] = []

    class Noting(FakeTransport):
        def answer_to(self, request: Request) -> Sequence[Any]:
            asked.append(request.images[0])
            return [final(LAYOUT)]

    with TesseraVlmClient(transport=Noting()) as vlm:
        mineru_client(vlm).layout_detect(known_page())
    return asked[0]


def seen(picture: bytes) -> str:
    """The name of the colour nearest to that in the middle of a picture."""
    with Image.open(io.BytesIO(picture)) as image:
        pixel = image.convert("RGB").getpixel((image.width // 2, image.height // 2))
    return min(COLORS, key=lambda name: sum(abs(a - b) for a, b in zip(COLORS[name], pixel)))


def picture(bars: Bars, size: tuple[int, int] = (400, 500)) -> Image.Image:
    """A page as a picture."""
    image = Image.new("RGB", size, "white")
    for color, (left, top, right, bottom) in zip(bars, BOXES.values()):
        scale = (size[0] / 1000, size[1] / 1000) * 2
        box = tuple(int(place * factor) for place, factor in zip((left, top, right, bottom), scale))
        ImageDraw.Draw(image).rectangle(box, fill=COLORS[color])
    return image


def write_pdf(path: Path, pages: Sequence[Bars | None]) -> Path:
    """A PDF with its pages' bars and a line of text on each. None: a page that the file names and does not have."""
    return write_drawn_pdf(path, [None if bars is None else _content(bars) for bars in pages])


def write_drawn_pdf(path: Path, pages: Sequence[str | None]) -> Path:
    """A PDF of these pages' drawing operators, in latin-1, with Helvetica as /F. None: as for :func:`write_pdf`."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for stream in pages:
        if stream is None:
            kids.append("9999 0 R")
            continue
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        about = "/Type /Page /Parent 2 0 R /Resources << /Font << /F 3 0 R >> >>"
        objects.append(f"<< {about} /MediaBox [0 0 {PAGE[0]} {PAGE[1]}] /Contents {len(objects)} 0 R >>")
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Count {len(pages)} /Kids [{' '.join(kids)}] >>"
    body, offsets = "%PDF-1.4\n", []
    for number, text in enumerate(objects, 1):
        offsets.append(len(body))
        body += f"{number} 0 obj\n{text}\nendobj\n"
    rows = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    trailer = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(body)}\n%%EOF\n"
    path.write_bytes(f"{body}xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{rows}{trailer}".encode("latin-1"))
    return path


def _content(bars: Bars) -> str:
    """A page's drawing operators; a PDF counts upwards from the bottom."""
    lines = []
    for color, (left, top, right, bottom) in zip(bars, BOXES.values()):
        place = [left * PAGE[0], (1000 - bottom) * PAGE[1], (right - left) * PAGE[0], (bottom - top) * PAGE[1]]
        red_green_blue = " ".join(f"{level / 255:.3f}" for level in COLORS[color])
        lines.append(f"{red_green_blue} rg {' '.join(f'{value / 1000:.1f}' for value in place)} re f")
    return "\n".join([*lines, "0 0 0 rg BT /F 12 Tf 70 20 Td (a page) Tj ET"])


def page_of(path: Path) -> dict[str, Any]:
    """A page's JSON."""
    return json.loads(path.read_bytes().decode(errors="surrogateescape"))


def contents(path: Path) -> list[str]:
    return [block["content"] for block in page_of(path)["blocks"]]


def error_rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "errors.jsonl").read_text().splitlines()]
