"""Which files are parsed, what a page looks like, and what its blocks become in Markdown."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents.document_reader import COLORS, picture, write_pdf
from PIL import Image

from tessera_documents.results import markdown
from tessera_documents.sources import BadDocument, find, open_document
from tessera_wire.errors import InvalidRequest

BARS = ("red", "green", "blue")


def touched(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_folders_are_searched_and_named_files_taken_as_they_are(tmp_path: Path) -> None:
    docs, out = tmp_path / "docs", tmp_path / "docs" / "out"
    touched(docs / "b.PDF", docs / "a.jpeg", docs / "x" / "c.tiff", docs / "x" / "notes.txt", tmp_path / "scan")
    touched(docs / ".git" / "d.png", docs / "._a.png", out / "a.jpeg" / "page-0001.jpg")
    found = find([docs, tmp_path / "scan", docs / "a.jpeg"], out)
    assert [str(source.folder) for source in found] == ["a.jpeg", "b.PDF", "x/c.tiff", "scan"]
    assert found[2].path == docs / "x" / "c.tiff"


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["nowhere.pdf"], "there is no file or folder .*nowhere.pdf"),
        (["empty"], "empty holds no documents .*.pdf .png"),
        (["one/a.pdf", "two/a.pdf"], "one/a.pdf and .*two/a.pdf would both be written to .*a.pdf"),
    ],
)
def test_what_cannot_begin_is_refused(tmp_path: Path, paths: list[str], words: str) -> None:
    touched(tmp_path / "one" / "a.pdf", tmp_path / "two" / "a.pdf", tmp_path / "empty" / "notes.txt")
    with pytest.raises(InvalidRequest, match=words):
        find([tmp_path / path for path in paths], tmp_path / "out")
    assert len(find([tmp_path], tmp_path / "out")) == 2
    with pytest.raises(InvalidRequest, match="one/a.pdf is a file, and would be the folder of results"):
        find([tmp_path / "one" / "a.pdf"], tmp_path / "one")


def test_a_page_is_rendered_upright_in_rgb_at_the_resolution_asked_for(tmp_path: Path) -> None:
    document = open_document(write_pdf(tmp_path / "a", [BARS, BARS]))  # whatever it is called
    assert document.pages == 2
    page = document.render(1, 72)
    assert (page.mode, page.size) == ("RGB", (612, 792))
    assert [page.getpixel((306, y)) for y in (80, 300, 600)] == [COLORS[name] for name in BARS]
    assert document.render(0, 144).size == (1224, 1584)
    assert 3500 <= max(document.render(0, 2000).size) <= 3501  # memory has an end
    document.close()


def as_saved(path: Path, image: Image.Image, **options: Any) -> Image.Image:
    image.save(path, **options)
    document = open_document(path)
    try:
        return document.render(document.pages - 1, 200)
    finally:
        document.close()


def test_pictures_become_what_a_reader_sees(tmp_path: Path) -> None:
    page = picture(BARS)
    assert as_saved(tmp_path / "a.bmp", page).tobytes() == page.tobytes()
    assert as_saved(tmp_path / "a.png", page.convert("P")).mode == "RGB"
    gray = as_saved(tmp_path / "b.png", Image.fromarray(np.full((8, 8), 40000, np.uint16)))
    assert gray.getpixel((4, 4)) == (156,) * 3
    clear = as_saved(tmp_path / "c.png", Image.new("RGBA", (8, 8), (0, 0, 0, 0)))
    assert clear.getpixel((4, 4)) == (255, 255, 255)  # paper, not night
    turned = Image.Exif()
    turned[0x0112] = 6
    assert as_saved(tmp_path / "d.jpg", page, exif=turned).size == (page.height, page.width)
    second = picture(("blue", "red", "black"))
    assert as_saved(tmp_path / "e.tif", page, save_all=True, append_images=[second]).tobytes() == second.tobytes()


@pytest.mark.parametrize("after", [0, 60])
def test_a_pdf_that_cannot_be_opened(tmp_path: Path, after: int) -> None:
    path = write_pdf(tmp_path / "a.pdf", [])
    path.write_bytes(path.read_bytes()[: after or None])
    with pytest.raises(BadDocument, match="damaged or has no pages"):
        open_document(path)


def block(kind: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"type": kind, "bbox": [0, 0, 1, 1], "angle": 0, "content": content, **more}


def test_every_kind_of_block() -> None:
    blocks = [
        block("header", "Annual report"),
        block("doc_title", "A report\nof things"),
        block("paragraph_title", r"On \( x^2 \)"),
        block("text", r"Let \(a\) be \( b \) or \\\\( c"),
        block("text", "and so on", merge_prev=True),
        block("equation", "\\[\na \\\\[2pt] b\n\\]"),
        block("table", r"<table><tr><td>\(1\)</td></tr></table>"),
        block("code", "x = 1\ny = 2"),
        block("image", None, picture="page-0001-9.jpg"),
        block("chart", "rising", picture="page-0001-10.jpg"),
        block("list", None),
        block("page_number", "7"),
    ]
    assert markdown(blocks).split("\n\n") == [
        "# A report of things",
        "## On $x^2$",
        r"Let $a$ be $b$ or \\\\( c and so on",
        "$$\na \\\\[2pt] b\n$$",
        r"<table><tr><td>\(1\)</td></tr></table>",
        "```\nx = 1\ny = 2\n```",
        "![image](page-0001-9.jpg)",
        "![chart](page-0001-10.jpg)",
        "rising\n",
    ]
    assert markdown([]) == "\n"
