"""From packages with PDFs to a set of pages: which pages count, and what is asked about them."""

from __future__ import annotations

import base64
import io
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from bench import replay_pages
from bench.replay_set import ReplaySet
from documents.document_reader import PAGE, write_drawn_pdf

WORDS = "one two three four five six seven eight nine ten eleven twelve"


def drawn(number: int, blocks: int, words: str = WORDS) -> str:
    """A page of paragraphs of two lines, all of them its own."""
    lines = []
    for block in range(blocks):
        for row, text in enumerate((f"{words} {number}", f"{words} {block}")):
            lines.append(f"BT /F 10 Tf 60 {PAGE[1] - 80 - 40 * block - 12 * row} Td ({text}) Tj ET")
    return "\n".join(lines)


TABLE = "\n".join(
    f"BT /F 10 Tf {60 + 120 * column} {200 - 16 * row} Td ({row}.{column}) Tj ET"
    for row in range(4)
    for column in range(3)
)
GARBLED = " ".join("x y z" for _ in range(10))


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Two packages and the vocabulary: 256 bytes, so that a token is a byte."""
    folder = tmp_path / "sources"
    folder.mkdir()
    good = write_drawn_pdf(tmp_path / "good.pdf", [drawn(number, 8) for number in range(4)])
    mixed = write_drawn_pdf(
        tmp_path / "mixed.pdf", [drawn(9, 8) + "\n" + TABLE, drawn(0, 8), "", drawn(1, 8, GARBLED), drawn(5, 3), None]
    )
    (tmp_path / "damaged.pdf").write_bytes(b"%PDF-1.4 and no more")
    for name, files in (("a-1.tar.gz", [good]), ("b-2.tar.gz", [mixed, tmp_path / "damaged.pdf"])):
        with tarfile.open(folder / name, "w:gz") as package:
            for file in files:
                package.add(file, f"{name[:3]}/tests/{file.name}")
            package.addfile(tarfile.TarInfo("../outside.pdf"), io.BytesIO())
    ranks = b"\n".join(base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256))
    with zipfile.ZipFile(folder / "v-3-py3-none-any.whl", "w") as wheel:
        wheel.writestr("v/qwen.tiktoken", ranks)
    return folder


def test_pages_are_chosen_and_asked_about(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["replay_pages.py", str(sources), "-o", str(tmp_path / "set.zip")])
    code, pages = replay_pages.main(), ReplaySet(tmp_path / "set.zip").pages
    good, mixed = "a-1.tar.gz/a-1/tests/good.pdf", "b-2.tar.gz/b-2/tests/mixed.pdf"
    assert [page.name for page in pages] == [*[f"{good} {number}" for number in (1, 2, 3, 4)], f"{mixed} 1"]
    text = 2 * len(WORDS) + 5  # two numbers, their spaces, and the one between the lines
    layout, *crops = pages[0].requests
    assert [(crop.kind, crop.tokens) for crop in crops] == [("[default]", text + 1)] * 8
    assert (layout.kind, layout.box) == ("[layout]", None)
    assert layout.tokens == 8 * (5 + len("000 000 000 000") + len("text")) + 7 + 1
    assert [crop.box for crop in crops] == sorted({crop.box for crop in crops})  # from top to bottom
    table = pages[4].requests[1]
    assert (table.kind, table.tokens) == ("table", 4 * (1 + 3 * (1 + 3)) + 1)
    said = capsys.readouterr().out
    passed = (
        "1 damaged or encrypted document",
        "1 no text",
        "1 garbled",
        "1 seen before",
        "1 too little text",
        "1 damaged",
    )
    assert all(reason in said for reason in passed)
    assert code == 1 and "crops                a page: mean     8.2" in said  # too few of them
