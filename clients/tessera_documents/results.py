"""What comes out: for each page JSON, Markdown and pictures, for each document its Markdown, and the rows of errors.

A file appears under its name only when it is whole, and a page's JSON is the last of its files: so a page with one is
complete, whatever ended the run that made it.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mineru_vl_utils.post_process import json2md
from PIL import Image

from tessera_documents.drawing import drawn

HEADINGS = {"doc_title": "# ", "title": "# ", "paragraph_title": "## "}
FIGURES = ("image", "chart")
CODE = ("code", "algorithm")
DISPLAY = ("\\[", "\\]")
INLINE = re.compile(r"(?<!\\)\\\(\s*(.+?)\s*\\\)", re.DOTALL)  # in Markdown, TeX's own \( would be a plain parenthesis
NOT_IN_MARKDOWN = ("header", "footer", "page_number")
BYTES_OF_NAMES = "surrogateescape"  # a file's name need not be UTF-8, and is written as it is
Blocks = Sequence[Mapping[str, Any]]


class PageFiles:
    """The results of one document, in ``folder``.

    ``made_from``: what a page's results depend on. Results of anything else are not taken for this document's.
    """

    def __init__(self, folder: Path, made_from: Mapping[str, Any]) -> None:
        self.folder = folder
        self._made_from = dict(made_from)

    def read(self, page: int) -> dict[str, Any] | None:
        """A page's JSON (pages from 0), or None where it is not complete."""
        try:
            found = json.loads(self._path(page, ".json").read_bytes().decode(errors=BYTES_OF_NAMES))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("made_from") == self._made_from else None

    def missing(self, pages: int) -> list[int]:
        """The pages that are not complete."""
        return [page for page in range(pages) if self.read(page) is None]

    def write(self, page: int, image: Image.Image, blocks: Blocks, warnings: Sequence[str]) -> None:
        """All files of a page: the blocks in reading order, and the page they were read from. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
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
            "made_from": self._made_from,
        }
        write_whole(
            self._path(page, ".json"), json.dumps(content, ensure_ascii=False, indent=1).encode(errors=BYTES_OF_NAMES)
        )

    def join(self, failed: Mapping[int, str], pages: int) -> None:
        """Writes ``document.md``, in which a comment stands for each page that failed. Raises OSError."""
        blocks: list[Mapping[str, Any]] = []
        for page in range(pages):
            if page in failed:
                blocks.append({"type": "failed", "content": f"<!-- page {page + 1} is missing, see errors.jsonl -->"})
            elif found := self.read(page):
                blocks += found["blocks"]
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / "document.md", markdown(blocks).encode())

    def _path(self, page: int, ending: str) -> Path:
        return self.folder / f"page-{page + 1:04}{ending}"


class ErrorRows:
    """``errors.jsonl``: a row for each page or file that failed in this run; without one there is no file."""

    def __init__(self, out: Path) -> None:
        self.path = out / "errors.jsonl"
        self.path.unlink(missing_ok=True)

    def add(self, file: Path, page: int | None, error: str) -> None:
        """``page`` from 0; None: the whole file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row = {"file": str(file), "page": None if page is None else page + 1, "error": error}
        with open(self.path, "a", encoding="utf-8", errors=BYTES_OF_NAMES) as file_of_rows:
            file_of_rows.write(json.dumps(row, ensure_ascii=False) + "\n")


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
    """Whoever reads ``path`` finds all of the new file or what was there before. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)


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
