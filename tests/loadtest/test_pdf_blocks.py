"""The blocks that a page's text layer gives, on pages drawn here: US letter, Helvetica, places in points."""

from __future__ import annotations

from pathlib import Path

import pypdfium2
from bench import pdf_blocks
from documents.document_reader import PAGE, write_drawn_pdf

PARAGRAPH = [
    "The quick brown fox jumps over the",
    "lazy dog and goes on to the wood,",
    "where nobody had seen it before.",
]


def line(left: float, top: float, text: str, size: float = 10) -> str:
    """A line of text whose box is about as high as its size."""
    return f"BT /F {size} Tf {left} {PAGE[1] - top - size} Td ({text}) Tj ET"


def paragraph(left: float, top: float, lines: list[str] = PARAGRAPH, indent: float = 0) -> list[str]:
    return [line(left + (indent if number == 0 else 0), top + 12 * number, text) for number, text in enumerate(lines)]


def found(folder: Path, *drawn: str) -> list[pdf_blocks.Block]:
    path = write_drawn_pdf(folder / "page.pdf", ["\n".join(drawn)])
    return pdf_blocks.blocks(pypdfium2.PdfDocument(path)[0])


def test_two_columns_a_title_and_a_page_number(tmp_path: Path) -> None:
    columns = [*paragraph(60, 200), *paragraph(60, 260), *paragraph(320, 200)]
    blocks = found(
        tmp_path, line(60, 100, "Of foxes", 18), *columns, line(300, 760, "- 7 -"), line(60, 20, "A journal")
    )
    assert [(block.kind, block.text) for block in blocks] == [
        ("title", "Of foxes"),
        *[("text", " ".join(PARAGRAPH))] * 3,
        ("page_number", "- 7 -"),
        ("header", "A journal"),
    ]
    left, top, right, bottom = blocks[1].box  # three lines from (60, 200) to about (220, 236)
    assert abs(left - 98) < 4 and abs(top - 252) < 4 and 340 < right < 380 and abs(bottom - 299) < 8
    assert blocks[3].box[0] > right


def test_an_indented_line_begins_a_paragraph(tmp_path: Path) -> None:
    lines = [*paragraph(60, 200), *paragraph(60, 236, indent=12)]
    assert [block.text for block in found(tmp_path, *lines)] == [" ".join(PARAGRAPH)] * 2


def test_rows_of_short_cells_are_a_table(tmp_path: Path) -> None:
    cells = [line(60 + 120 * column, 300 + 16 * row, f"{row}.{column}") for row in range(4) for column in range(3)]
    table, text = found(tmp_path, *paragraph(60, 200), *cells)
    assert (table.kind, text.kind) == ("table", "text")
    assert table.rows == tuple(tuple(f"{row}.{column}" for column in range(3)) for row in range(4))


def test_two_rows_are_none(tmp_path: Path) -> None:
    cells = [line(60 + 120 * column, 300 + 16 * row, f"{row}.{column}") for row in range(2) for column in range(3)]
    assert "table" not in [block.kind for block in found(tmp_path, *cells)]


def test_a_picture_counts_where_it_is_neither_tiny_nor_the_page(tmp_path: Path) -> None:
    places = [(306, 198, 61.2, 396), (5, 5, 100, 100), (612, 792, 0, 0)]  # width, height, left, bottom
    drawn = [f"q {w} 0 0 {h} {x} {y} cm BI /W 1 /H 1 /CS /G /BPC 8 ID x EI Q" for w, h, x, y in places]
    text, picture = found(tmp_path, *drawn, line(60, 700, "below"))
    assert (text.kind, picture) == ("text", pdf_blocks.Block("image", (100, 250, 600, 500)))


def test_an_empty_page_has_none(tmp_path: Path) -> None:
    assert found(tmp_path) == []
