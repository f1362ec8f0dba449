"""What comes out: for each page JSON, Markdown and pictures, for each document its Markdown, and the rows of errors.

A file appears under its name only when it is whole, and a page's JSON is the last of its files: so a page with one is
complete, whatever ended the run that made it.

The picture of a page with what was found on it: each block's box, its type, and its place in the reading order.
"""

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mineru_vl_utils.post_process import json2md
from PIL import Image, ImageDraw, ImageFont

from tessera_jobs.journal import Locked, replaced

HEADINGS = {"doc_title": "# ", "title": "# ", "paragraph_title": "## "}
FIGURES = ("image", "chart")
CODE = ("code", "algorithm")
DISPLAY = ("\\[", "\\]")
INLINE = re.compile(r"(?<!\\)\\\(\s*(.+?)\s*\\\)", re.DOTALL)  # in Markdown, TeX's own \( would be a plain parenthesis
PAGE_FILE = re.compile(r"page-(\d{4,})(-\d+)?\.(json|jpg|md)")
NOT_IN_MARKDOWN = ("header", "footer", "page_number")
BYTES_OF_NAMES = "surrogateescape"  # a file's name need not be UTF-8, and is written as it is
Blocks = Sequence[Mapping[str, Any]]


class OutputFolder(Locked):
    """Where all results go, and no other run's meanwhile.

    ``errors.jsonl`` in it has a row for each page or file that failed in this run; without one there is no file.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        super().__init__(path / ".lock", path)  # it stays: a run that waits may have it open
        self._errors = path / "errors.jsonl"
        self._errors.unlink(missing_ok=True)

    def add_error(self, file: Path, page: int | None, error: str) -> None:
        """``page`` from 0; None: the whole file."""
        row = {"file": str(file), "page": None if page is None else page + 1, "error": error}
        with open(self._errors, "a", encoding="utf-8", errors=BYTES_OF_NAMES) as rows:
            rows.write(json.dumps(row, ensure_ascii=False) + "\n")


class PageFiles:
    """The results of one document, ``source``, in ``folder``. Pages count from 0.

    ``made_from``: what a page's results depend on, but for ``checkpoint``, the model's digest. Results of anything else
    are not taken for this document's.
    """

    def __init__(self, source: Path, folder: Path, made_from: Mapping[str, Any], checkpoint: str) -> None:
        self.source, self.folder = source, folder
        self._made_from, self._checkpoint = dict(made_from), checkpoint
        self._failed: set[int] = set()

    def read(self, page: int) -> dict[str, Any] | None:
        """A page's JSON (pages from 0), of whatever model, or None where it or one of the page's pictures is not
        there."""
        try:
            found = json.loads(self._path(page, ".json").read_bytes().decode(errors=BYTES_OF_NAMES))
            figures = [block["picture"] for block in found["blocks"] if "picture" in block]
            made_from = {name: value for name, value in found["made_from"].items() if name != "checkpoint"}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        whole = all((self.folder / name).is_file() for name in (*figures, self._path(page, ".jpg").name))
        return found if whole and made_from == self._made_from else None

    def checkpoint_of(self, page: int) -> str | None:
        """The digest of the model that read a page; empty where an earlier version made it, None where it is not
        complete."""
        found = self.read(page)
        return None if found is None else found["made_from"].get("checkpoint", "")

    def take_up(self, pages: Sequence[int], count: int, every_model: bool) -> list[int]:
        """Those of the pages that are not complete; where not ``every_model`` counts, nor of this one. A Markdown file
        that is gone is written again for the others. What is there of a longer document than of ``count`` goes."""
        for path in self.folder.glob("page-*"):
            number = PAGE_FILE.fullmatch(path.name)
            if number and int(number[1]) > count:
                path.unlink(missing_ok=True)
        missing = []
        for page in pages:
            found = self.read(page)
            if found is None or not (every_model or found["made_from"].get("checkpoint") == self._checkpoint):
                missing.append(page)
            elif not self._path(page, ".md").is_file():
                write_whole(self._path(page, ".md"), markdown(found["blocks"]).encode())
        self._pages, self._left = pages, len(missing)
        return missing

    def write(self, page: int, image: Image.Image, blocks: Blocks, warnings: Sequence[str]) -> None:
        """All files of a page: the blocks in reading order, and the page they were read from. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob(f"page-{page + 1:04}-*.jpg"):
            old.unlink(missing_ok=True)
        kept = [dict(block) for block in blocks]
        for number, block in enumerate(kept, 1):
            if block["type"] in FIGURES:
                figure = self._path(page, f"-{number}.jpg")
                write_whole(figure, _jpeg(image.crop(_pixels(block["bbox"], image))))
                block["picture"] = figure.name
        write_whole(self._path(page, ".jpg"), _jpeg(drawn(image, kept)))
        write_whole(self._path(page, ".md"), markdown(kept).encode())
        content = {
            "file": self.folder.name,
            "page": page + 1,
            "width": image.width,
            "height": image.height,
            "blocks": kept,
            "warnings": list(warnings),
            "made_from": {**self._made_from, "checkpoint": self._checkpoint},
        }
        text = json.dumps(content, ensure_ascii=False, indent=1)
        write_whole(self._path(page, ".json"), text.encode(errors=BYTES_OF_NAMES))

    def end(self, page: int, failed: bool) -> bool:
        """Notes that a page is over which was missing; whether it was the last."""
        if failed:
            self._failed.add(page)
        self._left -= 1
        return not self._left

    def join(self) -> None:
        """Writes ``document.md``, in which a comment stands before each page, and for each that failed. Raises
        OSError, also where a page's results are gone."""
        blocks: list[Mapping[str, Any]] = []
        for page in self._pages:
            if page in self._failed:
                blocks.append({"type": "failed", "content": f"<!-- page {page + 1} is missing, see errors.jsonl -->"})
                continue
            found = self.read(page)
            if found is None or not self._path(page, ".md").is_file():
                raise OSError(f"results of page {page + 1} in {self.folder} were removed or cut during this run")
            blocks += [{"type": "mark", "content": f"<!-- page {page + 1} -->"}, *found["blocks"]]
        self.folder.mkdir(parents=True, exist_ok=True)
        path, text = self.folder / "document.md", markdown(blocks).encode()
        if not path.is_file() or path.read_bytes() != text:  # a run over what is complete writes nothing
            write_whole(path, text)

    def _path(self, page: int, ending: str) -> Path:
        return self.folder / f"page-{page + 1:04}{ending}"


def markdown(blocks: Blocks) -> str:
    """Blocks in reading order as Markdown: joined as MinerU does, with headings, code, figures and formulas marked, and
    without what only repeats on every page."""
    shown = [{**block, "content": _content(block)} for block in blocks if block["type"] not in NOT_IN_MARKDOWN]
    return json2md(shown) + "\n"


def _content(block: Mapping[str, Any]) -> str | None:
    kind, content = block["type"], block["content"]
    if "picture" in block:
        return f"![{kind}]({block['picture']})" + (f"\n\n{content}" if content else "")
    if not content or kind == "table":  # which is HTML
        return content
    if kind in CODE:
        return f"```\n{content}\n```"
    if kind == "equation":
        return f"$$\n{content.removeprefix(DISPLAY[0]).removesuffix(DISPLAY[1]).strip()}\n$$"
    content = INLINE.sub(r"$\1$", content)
    return HEADINGS[kind] + " ".join(content.split()) if kind in HEADINGS else content


def write_whole(path: Path, data: bytes) -> None:
    with replaced(path) as file:
        file.write(data)


def _pixels(bbox: Sequence[float], image: Image.Image) -> tuple[int, int, int, int]:
    left, top, right, bottom = bbox
    return (
        int(left * image.width),
        int(top * image.height),
        max(int(right * image.width), int(left * image.width) + 1),
        max(int(bottom * image.height), int(top * image.height) + 1),
    )


def _jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


LONGEST_SIDE = 1600  # pixels: enough to read by
COLORS = {
    "text": "#1f6feb", "title": "#cf222e", "table": "#1a7f37", "equation": "#9a6700", "image": "#8250df",
    "chart": "#8250df", "caption": "#bf3989", "footnote": "#bf3989",
}  # fmt: skip
"""By the last word of a block's type that is here."""
OTHER = "#57606a"


def drawn(page: Image.Image, blocks: Sequence[Mapping[str, Any]]) -> Image.Image:
    """A smaller copy of the page (RGB) with its blocks; their boxes are fractions of its width and height."""
    picture = page.copy()
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    draw = ImageDraw.Draw(picture)
    size = max(10, picture.height // 70)
    font = ImageFont.load_default(size)
    for number, block in enumerate(blocks, 1):
        left, top, right, bottom = (
            fraction * side for fraction, side in zip(block["bbox"], (picture.width, picture.height) * 2)
        )
        color = next((COLORS[word] for word in reversed(block["type"].split("_")) if word in COLORS), OTHER)
        draw.rectangle((left, top, right, bottom), outline=color, width=2)
        label = f"{number} {block['type']}"
        at = (left, max(0, top - size - 2))
        draw.rectangle(draw.textbbox(at, label, font), fill=color)
        draw.text(at, label, "white", font)
    return picture
