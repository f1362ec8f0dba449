"""What a PDF's letters are as drafts of blocks: words, lines, cells; and how `tessera parse` sends them along."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents.document_reader import FIRST, PAGE, DocumentReader, page_of, picture, write_drawn_pdf, write_pdf

from tessera_client.messages import ServedModel
from tessera_documents import text_layer
from tessera_documents.sources import open_document
from tessera_documents.text_layer import TextLayer

ALL = (0.0, 0.0, 1.0, 1.0)


def shown(*placed: tuple[float, float, str], turned: str = "1 0 0 1") -> str:
    """Drawing operators of texts at points from the page's bottom left."""
    return "BT /F 12 Tf " + " ".join(f"{turned} {x} {y} Tm ({text}) Tj" for x, y, text in placed) + " ET"


def layer_of(tmp_path: Path, *placed: tuple[float, float, str], about: str = "", **how: str) -> TextLayer:
    path = write_drawn_pdf(tmp_path / "a.pdf", [shown(*placed, **how)])
    path.write_bytes(path.read_bytes().replace(b"/MediaBox", about.encode() + b" /MediaBox"))
    document = open_document(path)
    layer = document.text(0)
    document.close()
    assert layer is not None
    return layer


def test_lines_are_joined_in_reading_order_and_hyphens_and_ligatures_undone(tmp_path: Path) -> None:
    layer = layer_of(
        tmp_path,
        (70, 672, "of 2010-"),
        (70, 700, "An of\xaece, a recon-"),
        (70, 658, "2012 well-known"),
        (150, 686, "the next"),  # behind what stands left of it, and before it in the file
        (70, 686, "struction, and"),
        (70, 100, "elsewhere"),
    )
    box = (0.1, 0.1, 0.9, 0.2)
    assert layer.draft("text", box) == "An office, a reconstruction, and the next of 2010-2012 well-known"
    lines = "An office, a recon-\nstruction, and the next\nof 2010-\n2012 well-known"
    assert layer.draft("code", box) == lines
    assert layer.draft("text", (0.1, 0.8, 0.9, 0.9)) == "elsewhere"
    assert layer.draft("text", (0.1, 0.3, 0.9, 0.4)) is None
    for kind in ("equation", "image", "chart", "list"):
        assert layer.draft(kind, box) is None
    assert [layer.draft("text", box, angle) for angle in (90, 180, 270)] == [None] * 3
    assert layer.draft("text", box, 0) == layer.draft("text", box, None)


def test_a_letter_is_of_the_box_that_has_its_middle(tmp_path: Path) -> None:
    layer = layer_of(tmp_path, (72, 720, "left"), (306, 720, "right"))
    assert layer.draft("text", (0, 0, 0.5, 1)) == "left"
    assert layer.draft("text", (0.5, 0, 1, 1)) == "right"


def test_a_turned_page_is_read_as_it_is_drawn(tmp_path: Path) -> None:
    """And one that is cut, whose letters stand nearer to its edges."""
    about = "/Rotate 90 /CropBox [100 100 500 700]"
    placed = (112, 110, "at the top"), (112, 600, "of it"), (490, 110, "bottom")  # which is on the sheet's right
    layer = layer_of(tmp_path, *placed, about=about, turned="0 1 -1 0")
    assert layer.draft("text", (0, 0, 1, 0.1)) == "at the top of it"
    assert layer.draft("text", (0, 0, 0.5, 0.1)) == "at the top"
    assert layer.draft("text", (0, 0.9, 0.5, 1)) == "bottom"


def test_a_table_is_drafted_in_the_marks_of_its_answer(tmp_path: Path) -> None:
    layer = layer_of(
        tmp_path,
        *((100, 700, "Name"), (200, 700, "Of both years")),
        *((100, 680, "One room"), (200, 680, "1"), (300, 680, "2.5")),
        *((300, 660, "17"), (100, 660, "Hall")),
    )
    rows = ["<fcel>Name<fcel>Of both years<ecel>", "<fcel>One room<fcel>1<fcel>2.5", "<fcel>Hall<ecel><fcel>17"]
    assert layer.draft("table", ALL) == "".join(f"{row}<nl>" for row in rows)
    assert layer.draft("text", ALL) == "Name Of both years One room 1 2.5 Hall 17"
    assert layer.draft("table", (0, 0.9, 1, 1)) is None
    wide = layer_of(tmp_path, (100, 700, "of the two years that are below"), (100, 680, "1"), (200, 680, "2"))
    assert wide.draft("table", ALL) == "<fcel>of the two years that are below<lcel><nl><fcel>1<fcel>2<nl>"


def drawn(*lines: Sequence[str]) -> TextLayer:
    """Letters as wide as they are high, beside each other."""
    letters, boxes = [], []
    for row, line in enumerate(lines):
        for column, letter in enumerate(line):
            letters.append(letter)
            boxes.append((10 * column, 12 * row, 10 * column + 10, 12 * row + 10))
    return TextLayer(letters, np.array(boxes, float), (100, 100))


@pytest.mark.parametrize(
    ("lines", "draft"),
    [
        (["漢字", "かな"], "漢字かな"),
        (["漢字", "ab"], "漢字ab"),
        (["a-", "b"], "ab"),
        (["a-", "B"], "a-B"),
        (["1-", "b"], "1-b"),
        (["a -", "b"], "a - b"),
        (["-", "b"], "- b"),
        (["a\u00ad", "b\u00adc"], "abc"),
        (["a\u2010", "b"], "ab"),
        (["a b", "", "c"], "a b c"),
        (["<&'"], "<&'"),
    ],
)
def test_how_lines_are_joined(lines: list[str], draft: str) -> None:
    assert drawn(*lines).draft("text", ALL) == draft


def test_what_has_no_letters_or_too_many_has_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(FIRST).save(tmp_path / "a.png")
    assert open_document(tmp_path / "a.png").text(0) is None
    scan = open_document(write_drawn_pdf(tmp_path / "a.pdf", ["0 0 100 100 re f"]))
    assert scan.text(0) is None
    document = open_document(write_pdf(tmp_path / "b.pdf", [FIRST]))
    assert document.text(0) is not None
    monkeypatch.setattr(text_layer, "MOST_LETTERS", 5)
    assert document.text(0) is None


def test_drafts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_layer, "MOST_CHARACTERS", 3)
    assert drawn("abcdef").draft("text", ALL) == "abc"


TEXTS = ((70, 730, "A title"), (70, 600, "Some words of"), (70, 586, "the text"), (70, 200, "a"), (200, 200, "b"))
DRAFTS = {"A title", "Some words of the text", "<fcel>a<fcel>b<nl>"}


def test_crops_go_with_the_text_of_their_blocks(parse: Any, tmp_path: Path) -> None:
    write_drawn_pdf(tmp_path / "a.pdf", [shown(*TEXTS)])
    (width, height), told = PAGE, {}
    assert (width, height) == (612, 792)
    for name, options in (("with", ()), ("without", ("--no-drafts", "--force"))):
        reader = DocumentReader()
        (tmp_path / "out").mkdir(exist_ok=True)
        assert parse(reader, tmp_path / "a.pdf", *options) == 0
        path = tmp_path / "out" / "a.pdf" / "page-0001.json"
        told[name] = page_of(path), [json.loads(request.sampling) for request, *_ in reader.requests]
        path.unlink()
    (page, (layout, *crops)), (same, undrafted) = told["with"], told["without"]
    assert page == same
    assert {crop["draft"] for crop in crops} == DRAFTS and "draft" not in layout
    (pool,) = {asked["draft_pool"] for asked in (layout, *crops)}
    assert pool and not any({"draft", "draft_pool"} & set(asked) for asked in undrafted)


def test_what_another_server_finds_is_read_with_its_text(parse: Any, tmp_path: Path) -> None:
    write_drawn_pdf(tmp_path / "a.pdf", [shown(*TEXTS)])
    finder, reader = DocumentReader(), DocumentReader()
    reader.model = ServedModel("a" * 32, "paddleocr_vl")
    engine = ("--engine", "paddleocr-vl", "--layout-url", "layout:1")
    assert parse(reader, tmp_path / "a.pdf", *engine, layout=finder) == 0
    assert {json.loads(request.sampling)["draft"] for request, *_ in reader.requests} == DRAFTS
    assert ["draft" in json.loads(request.sampling) for request, *_ in finder.requests] == [False]


def test_a_job_shares_its_answers_with_no_other(parse: Any, tmp_path: Path) -> None:
    picture(FIRST).save(tmp_path / "a.png")
    pools = []
    for _ in range(2):
        reader = DocumentReader()
        assert parse(reader, tmp_path / "a.png") == 0
        pools.append(json.loads(reader.requests[0][0].sampling)["draft_pool"])
        (tmp_path / "out" / "a.png" / "page-0001.json").unlink()
    assert pools[0] != pools[1]
