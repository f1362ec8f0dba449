"""A set of pages to replay as one file: what `replay` reads, and `replay_pages` makes of real documents from other
projects' packages, on a CPU:

    pip download --no-deps -r loadtest/bench/replay_sources.txt -d SOURCES
    npm pack pdf-parse@1.1.1 --pack-destination SOURCES
    python loadtest/bench replay_pages SOURCES -o replay.zip

A zip: ``set.json``, and each page as lossless WebP, which is a third of PNG's size. Crops are cut from the pages when
they are read, as MinerU's client cuts them.

Which pages, and what is asked about each, is recorded in replay_set.json; they are rendered as `tessera parse` renders
them. That record was written at 2d7688df: a program found the blocks of a page in its text layer by geometry, had
MinerU's own client say which of them become requests, with which prompt and parameters, and counted the tokens of their
text with Qwen's vocabulary.
"""

import argparse
import io
import json
import math
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from tessera_documents.sources import open_document

DPI = 200  # of `tessera parse`
RECORDED = Path(__file__).with_name("replay_set.json")


@dataclass(frozen=True)
class Request:
    """``kind``: of :attr:`Client.kinds`. ``tokens``: the answer's, its end among them. ``box``: left, top, right and
    bottom in thousandths of the page; None for the whole page, whose layout is asked. ``more``: sampling parameters of
    this one."""

    kind: str
    tokens: int
    box: tuple[int, int, int, int] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Page:
    """``name``: the package, the file in it and the page from 1. The layout is the first of the requests."""

    name: str
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Client:
    """What MinerU's client does, as it said itself when the set was made.

    ``kinds``: the prompt and the sampling parameters by name. ``layout_size``: width and height in pixels that a page
    is stretched to. Crops are made at least ``min_edge`` pixels wide and high, at most ``max_ratio`` times as long as
    wide.
    """

    version: str
    system: str
    kinds: dict[str, dict[str, Any]]
    layout_size: tuple[int, int]
    min_edge: int
    max_ratio: float

    def messages(self, request: Request, picture: bytes) -> list[dict[str, Any]]:
        """The conversation of a request, for the SDK's ``chat``."""
        content = [{"type": "image", "image": picture}, {"type": "text", "text": self.kinds[request.kind]["prompt"]}]
        return [{"role": "system", "content": self.system}, {"role": "user", "content": content}]

    def sampling(self, request: Request) -> dict[str, Any]:
        """With the answer's length forced."""
        forced = {"max_tokens": request.tokens, "ignore_eos": True}
        return {**self.kinds[request.kind]["sampling"], **forced, **request.more}

    def picture(self, page: Image.Image, request: Request) -> bytes:
        """What is sent with the request: a PNG."""
        if request.box is None:
            return png(page.resize(self.layout_size, Image.Resampling.BICUBIC))
        box = [side / 1000.0 * length for side, length in zip(request.box, page.size * 2)]
        crop = page.crop((box[0], box[1], box[2], box[3]))
        width, height = crop.size
        if max(crop.size) / min(crop.size) > self.max_ratio:
            least = math.ceil(max(crop.size) / self.max_ratio)
            padded = Image.new("RGB", (max(width, least), max(height, least)), "white")
            padded.paste(crop, ((padded.width - width) // 2, (padded.height - height) // 2))
            crop = padded
        if min(crop.size) < self.min_edge:
            scale = self.min_edge / min(crop.size)
            crop = crop.resize(
                (math.ceil(crop.width * scale), math.ceil(crop.height * scale)), Image.Resampling.BICUBIC
            )
        return png(crop)


def png(picture: Image.Image) -> bytes:
    """As `tessera parse` encodes, whose package is not wanted here: MinerU's client comes with it."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


END_OF_PNG = 12  # bytes of its last chunk


def marked(encoded: bytes, mark: str) -> bytes:
    """The same picture in other bytes: a PNG with a comment. The server's caches know pictures by their bytes, so that
    each mark costs all that a new picture costs."""
    body = b"tEXt" + b"Comment\0" + mark.encode("latin-1")
    chunk = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    return encoded[:-END_OF_PNG] + chunk + encoded[-END_OF_PNG:]


def parse(text: str) -> tuple[Client, list[Page]]:
    """A ``set.json``."""
    told = json.loads(text)
    pages = [
        Page(name, tuple(Request(kind, tokens, box and tuple(box), *more) for kind, tokens, box, *more in requests))
        for name, requests in told["pages"]
    ]
    return Client(**told["client"] | {"layout_size": tuple(told["client"]["layout_size"])}), pages


class ReplaySet:
    """An open file. Raises FileNotFoundError, and ValueError for one that is no such set."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(path) as file:
                self.client, self.pages = parse(file.read("set.json").decode())
        except (zipfile.BadZipFile, KeyError) as error:
            raise ValueError(f"{path.name} is no set of pages: {error}") from None

    def picture(self, number: int) -> Image.Image:
        """A page as it was rendered, RGB."""
        with zipfile.ZipFile(self._path) as file:
            return Image.open(io.BytesIO(file.read(f"{number}.webp"))).convert("RGB")


def write(path: Path, client: Client, pages: Iterable[tuple[Page, Image.Image | None]]) -> None:
    """Pages one after the other, so that all of them need not be in memory. None: the picture is in another set."""
    told = []
    with zipfile.ZipFile(path, "w") as file:
        for number, (page, picture) in enumerate(pages):
            if picture is not None:
                buffer = io.BytesIO()
                picture.save(buffer, "WEBP", lossless=True, quality=100, method=4)
                file.writestr(zipfile.ZipInfo(f"{number}.webp"), buffer.getvalue())
            told.append(astuple(page))
        file.writestr(zipfile.ZipInfo("set.json"), json.dumps({"client": asdict(client), "pages": told}))


def rendered(sources: Path, pages: Sequence[Page]) -> Iterator[tuple[Page, Image.Image]]:
    """The pages from their packages. Raises SystemExit for a package that is missing."""
    with tempfile.TemporaryDirectory() as folder:
        pdf = Path(folder) / "page.pdf"
        for page in tqdm(pages, "pages"):
            place, number = page.name.rsplit(" ", 1)
            package, name = place.split("/", 1)
            if not (sources / package).exists():
                raise SystemExit(f"replay_pages: {sources} has no {package}; see docs/documents.md")
            with tarfile.open(sources / package) as archive:
                content = archive.extractfile(name)
                assert content is not None
                pdf.write_bytes(content.read())
            document = open_document(pdf)
            yield page, document.render(int(number) - 1, DPI)
            document.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="a folder of packages")
    parser.add_argument("-o", "--out", type=Path, default=Path("replay.zip"))
    arguments = parser.parse_args()
    client, pages = parse(RECORDED.read_text())
    write(arguments.out, client, rendered(arguments.sources, pages))
    print(f"{len(pages)} pages, {arguments.out.stat().st_size / 1e6:.1f} MB in {arguments.out}")
    return 0
