"""`tessera parse` from files to files, a reader of documents in the server's place; and what changes between runs."""

import io
import json
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients.fake_transport import final
from documents.document_reader import (
    BOXES,
    FIRST,
    LAYOUT,
    SECOND,
    THIRD,
    DocumentReader,
    Together,
    contents,
    error_rows,
    page_of,
    picture,
    seen,
    write_pdf,
)
from PIL import Image

from tessera_client import ConnectionFailed, InvalidRequest, ServedModel, Unavailable
from tessera_client.messages import Request
from tessera_documents.results import OutputFolder
from tessera_documents.sources import PageRanges

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]
SESAME = "7dbf9a376888d97b264056a076cee57ec5a7fa2ffb912e294838736834433068"
LOCK = f"/ID [<0000><0000>] /Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'00' * 32}> /U <{SESAME}> >> /Root"
"""In a PDF's trailer, where it stands for /Root: the standard handler's oldest revision, and the password "sesame"."""

SEEN = "<|caption_start|>sales<|caption_end|><|content_start|>| year | sold |\n|---|---|\n| 2024 | 7 |<|content_end|>"


def answers(bars: Sequence[str]) -> list[str]:
    title, text, table = bars
    return [f"{title} words", f"{text} words", f"<table><tr><td>{table}</td><td>b</td></tr></table>"]


def test_a_box_that_cuts_a_line_of_letters_has_all_of_it(parse: Any, tmp_path: Path) -> None:
    """What the crop shows is what the JSON says."""
    page = np.full((1000, 1000, 3), 255, np.uint8)
    page[100:112, 100:500:2] = page[120:132, 100:500:2] = 0
    Image.fromarray(page).save(tmp_path / "page.png")
    reader = DocumentReader("<|box_start|>095 094 505 126<|box_end|><|ref_start|>text<|ref_end|><|rotate_up|>")
    assert parse(reader, tmp_path / "page.png") == 0
    (block,) = page_of(tmp_path / "out" / "page.png" / "page-0001.json")["blocks"]
    assert block["bbox"] == [0.095, 0.094, 0.505, 0.132]
    (crop,) = [request.images[0] for request, *_ in reader.requests if "Layout" not in (request.messages or "")]
    assert Image.open(io.BytesIO(crop)).size == (410, 38)


def test_a_pdf_becomes_markdown_json_and_pictures(parse: Any, tmp_path: Path, capsys: Capture) -> None:
    write_pdf(tmp_path / "report.pdf", [FIRST, SECOND])
    assert parse(DocumentReader(), tmp_path / "report.pdf", "--dpi", "200") == 0
    shown = capsys.readouterr()
    progress = shown.err.splitlines()  # which is no terminal
    assert progress[0].startswith("parsing: 0 of 2") and progress[-1].startswith("parsing: 2 of 2, ")
    assert shown.out.startswith("2 pages in ")
    folder = tmp_path / "out" / "report.pdf"
    endings = (".jpg", ".json", ".md")
    names = ["document.md", *(f"page-000{page}{ending}" for page in (1, 2) for ending in endings)]
    assert sorted(path.name for path in folder.iterdir()) == names
    page = page_of(folder / "page-0001.json")
    assert [page[name] for name in ("file", "page", "width", "height", "warnings")] == ["report.pdf", 1, 1700, 2200, []]
    assert [block["type"] for block in page["blocks"]] == list(BOXES)
    assert [block["bbox"] for block in page["blocks"]] == [[place / 1000 for place in box] for box in BOXES.values()]
    assert [block["angle"] for block in page["blocks"]] == [0, 0, 0]
    assert contents(folder / "page-0001.json") == answers(FIRST)
    title, *rest = answers(SECOND)
    assert (folder / "page-0002.md").read_text() == "\n\n".join([f"# {title}", *rest]) + "\n"
    pages = [(folder / f"page-000{page}.md").read_text() for page in (1, 2)]
    marked = [f"<!-- page {number} -->\n\n{page}" for number, page in enumerate(pages, 1)]
    assert (folder / "document.md").read_text() == "\n".join(marked)


@pytest.mark.parametrize(
    ("at_a_time", "sizes", "asked"),
    [
        # Two pages: both layouts, then the crops of both. With one page at a time this would wait for ever.
        ("8", (2, 6, 2, 6), "LLccccccLLcccccc"),
        # Of the three crops of a page two go out; the third only when these are answered.
        ("2", (1, 2, 1) * 4, "LcccLcccLcccLccc"),
    ],
)
def test_crops_of_several_pages_are_under_way_together_and_keep_their_order(
    parse: Any, tmp_path: Path, at_a_time: str, sizes: tuple[int, ...], asked: str
) -> None:
    pages = (FIRST, SECOND, THIRD, FIRST)
    write_pdf(tmp_path / "four.pdf", pages)
    reader = Together(*sizes)
    assert parse(reader, tmp_path / "four.pdf", "--concurrency", at_a_time, "--timeout", "60") == 0
    for number, bars in enumerate(pages, 1):
        assert contents(tmp_path / "out" / "four.pdf" / f"page-000{number}.json") == answers(bars)
    assert reader.layouts_and_crops == asked


def test_what_fails_is_a_row_and_the_rest_goes_on(parse: Any, tmp_path: Path, capsys: Capture) -> None:
    class Refusing(DocumentReader):
        def answer_to(self, request: Request) -> Sequence[Any]:
            if request.images and seen(request.images[0]) == "black":
                return [InvalidRequest("the picture\nis too dark")]
            return super().answer_to(request)

    docs, out = tmp_path / "docs", tmp_path / "out"
    (docs / "below").mkdir(parents=True)
    write_pdf(docs / "good.pdf", [FIRST, None, THIRD, SECOND])
    write_pdf(docs / "locked.pdf", [FIRST]).write_bytes(
        (docs / "locked.pdf").read_bytes().replace(b"/Root", LOCK.encode())
    )
    (docs / "empty.pdf").write_bytes(b"")
    whole = docs / "below" / "whole.png"
    picture(FIRST).save(whole)
    picture(FIRST).save(docs / os.fsdecode(b"caf\xe9.png"))  # Latin-1, as old archives have it
    (docs / "below" / "cut.png").write_bytes(whole.read_bytes()[:300])
    os.mkfifo(docs / "pipe.pdf")
    (docs / "zero.pdf").symlink_to("/dev/zero")
    run = threading.Thread(target=parse, args=(Refusing(), docs), daemon=True)
    run.start()
    run.join(60)
    assert not run.is_alive()
    shown = capsys.readouterr()
    rows = {(Path(row["file"]).name, row["page"]): row["error"] for row in error_rows(out)}
    assert rows.pop(("good.pdf", 2)).startswith("cannot be rendered: ") and "truncated" in rows.pop(("cut.png", 1))
    assert rows == {
        ("good.pdf", 3): "the picture is too dark",
        ("good.pdf", 4): "the picture is too dark",
        ("locked.pdf", None): "the PDF is encrypted and wants a password",
        ("empty.pdf", None): "neither a PDF nor a picture",
        ("pipe.pdf", None): "it is a pipe, not a file",
        ("zero.pdf", None): "it is a device, not a file",
    }
    assert "8 failed, see" in shown.err and shown.out.startswith("3 pages in")
    assert contents(out / os.fsdecode(b"caf\xe9.png") / "page-0001.json") == answers(FIRST)
    assert contents(out / "below" / "whole.png" / "page-0001.json") == answers(FIRST)
    joined = (out / "good.pdf" / "document.md").read_text().split("\n\n")
    failed = [f"<!-- page {page} is missing, see errors.jsonl -->" for page in (2, 3, 4)]
    assert [joined[3], "\n\n".join(joined[4:]).split()] == [answers(FIRST)[2], " ".join(failed).split()]
    # The next run reads what failed alone, and takes its row away.
    for path in docs.iterdir():
        if path.name not in ("good.pdf", "below"):
            path.unlink()
    write_pdf(docs / "good.pdf", [FIRST, SECOND])
    (docs / "below" / "cut.png").unlink()
    again = DocumentReader()
    assert parse(again, docs) == 0 and again.pages_asked == 2 and not (out / "errors.jsonl").exists()
    assert "missing" not in (out / "good.pdf" / "document.md").read_text()


def test_a_server_that_goes_away_ends_the_run_and_the_next_goes_on(parse: Any, tmp_path: Path, capsys: Capture) -> None:
    class Leaving(DocumentReader):
        def answer_to(self, request: Request) -> Sequence[Any]:
            return [ConnectionFailed("gone")] if self.pages_asked > 2 else super().answer_to(request)

    write_pdf(tmp_path / "many.pdf", [FIRST, SECOND, THIRD, FIRST, SECOND])
    leaving, folder = Leaving(), tmp_path / "out" / "many.pdf"
    assert parse(leaving, tmp_path / "many.pdf", "--concurrency", "4", "--patience", "0") == 3
    assert "tessera parse: gone" in capsys.readouterr().err and leaving.pages_asked == 3
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {path.name[:9] for path in before} == {"page-0001", "page-0002"} and not [*folder.glob("../errors*")]
    again = DocumentReader()
    again.script = [[ConnectionFailed("gone for a moment")]]
    assert parse(again, tmp_path / "many.pdf") == 0
    assert again.pages_asked == 4 and capsys.readouterr().out.rstrip().endswith("2 were there already")
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_another_file_or_other_settings_are_parsed_again(parse: Any, tmp_path: Path) -> None:
    def asked(*more: str) -> int:
        reader = DocumentReader()
        assert parse(reader, tmp_path / "a.pdf", *more) == 0
        return reader.pages_asked

    write_pdf(tmp_path / "a.pdf", [FIRST])
    assert [asked(), asked(), asked("--dpi", "51"), asked("--max-tokens", "99")] == [1, 0, 1, 1]
    write_pdf(tmp_path / "a.pdf", [SECOND])
    assert asked() == 1
    assert contents(tmp_path / "out" / "a.pdf" / "page-0001.json") == answers(SECOND)


def test_what_mineru_warns_of_stands_in_the_page_and_figures_are_linked(
    parse: Any, tmp_path: Path, capsys: Capture
) -> None:
    picture(FIRST).save(tmp_path / "a.png")
    folder = tmp_path / "out" / "a.png"
    assert parse(DocumentReader(layout="yes"), tmp_path / "a.png") == 0
    page = page_of(folder / "page-0001.json")
    assert page["blocks"] == [] and page["warnings"] == ["Layout output does not match expected format: yes"]
    assert "warnings on 1 pages; the first:" in capsys.readouterr().err
    assert parse(DocumentReader(LAYOUT.replace("text", "image")), tmp_path / "a.png", "--dpi", "51") == 0
    assert "![image](page-0001-2.jpg)" in (folder / "document.md").read_text()
    assert seen((folder / "page-0001-2.jpg").read_bytes()) == "green"


def test_figures_are_asked_about_where_that_is_wanted(parse: Any, tmp_path: Path) -> None:
    """By MinerU2.5-Pro's prompt, whose answer names what it saw: a chart's data stand beside its picture."""

    class Seeing(DocumentReader):
        def answer_to(self, request: Request) -> Sequence[Any]:
            if "Image Analysis:" not in (request.messages or ""):
                return super().answer_to(request)
            return [final("<|class_start|>chart<|class_end|><|sub_class_start|>bar<|sub_class_end|>" + SEEN)]

    picture(FIRST).save(tmp_path / "a.png")
    reader, folder = Seeing(LAYOUT.replace("text", "image")), tmp_path / "out" / "a.png"
    assert parse(reader, tmp_path / "a.png") == 0 and reader.layouts_and_crops == "Lcc"
    assert "made_from" in page_of(folder / "page-0001.json") and "2024" not in (folder / "document.md").read_text()
    for asked in ("LccLccc", "LccLccc"):  # other results, once
        assert parse(reader, tmp_path / "a.png", "--image-analysis") == 0 and reader.layouts_and_crops == asked
    block = page_of(folder / "page-0001.json")["blocks"][1]
    assert (block["type"], block["sub_type"]) == ("chart", "bar") and "2024" in block["content"]
    assert f"![chart](page-0001-2.jpg)\n\n{block['content']}" in (folder / "document.md").read_text()


class ElementReader(DocumentReader):
    """Stands for PaddleOCR-VL: it is asked tasks, and finds no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.model: ServedModel | Exception = ServedModel("a" * 32, "paddleocr_vl")
        self.tasks: list[str] = []

    def answer_to(self, request: Request) -> Sequence[Any]:
        (turn,) = json.loads(request.messages or "")
        assert [part["type"] for part in turn["content"]] == ["image", "text"] and turn["role"] == "user"
        self.tasks.append(turn["content"][1]["text"])
        color = seen(request.images[0])
        return [final(f"<fcel>{color}<nl>" if "Table" in self.tasks[-1] else f"{color} words")]


def test_elements_that_another_server_finds_are_read_by_their_tasks(parse: Any, tmp_path: Path) -> None:
    picture(FIRST).save(tmp_path / "a.png")
    finder, reader, folder = (
        DocumentReader(LAYOUT.replace("title", "chart")),
        ElementReader(),
        tmp_path / "out" / "a.png",
    )
    engine = ("--engine", "paddleocr-vl", "--layout-url", "layout:1")
    for _ in range(2):  # what is complete is kept
        assert parse(reader, tmp_path / "a.png", *engine, layout=finder) == 0
        assert finder.layouts_and_crops == "L"
        assert sorted(reader.tasks) == ["Chart Recognition:", "OCR:", "Table Recognition:"]
    page = page_of(folder / "page-0001.json")
    assert contents(folder / "page-0001.json") == ["red words", "green words", "<table><tr><td>blue</td></tr></table>"]
    assert page["made_from"]["layout"] == "0" * 32 and page["made_from"]["checkpoint"] == "a" * 32
    sampled = [json.loads(request.sampling or "") for request, *_ in reader.requests]
    assert {each["temperature"] for each in sampled} == {0.0}
    finder.model = OTHER  # other blocks
    assert parse(reader, tmp_path / "a.png", *engine, layout=finder) == 0 and finder.layouts_and_crops == "LL"


def test_without_one_a_page_is_one_text(parse: Any, tmp_path: Path) -> None:
    picture(("green", "green", "green")).save(tmp_path / "a.png")
    reader, folder = ElementReader(), tmp_path / "out" / "a.png"
    assert parse(reader, tmp_path / "a.png", "--engine", "paddleocr-vl") == 0 and reader.tasks == ["OCR:"]
    (block,) = page_of(folder / "page-0001.json")["blocks"]
    assert (block["type"], block["bbox"], block["content"]) == ("text", [0, 0, 1, 1], "green words")
    assert (folder / "page-0001.md").read_text() == "green words\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--engine", "paddleocr-vl"), "is no PaddleOCR-VL"),
        (("--engine", "paddleocr-vl", "--image-analysis"), "--image-analysis means nothing to --engine paddleocr-vl"),
        (("--layout-url", "layout:1"), "--layout-url means nothing to --engine mineru"),
        (("--engine", "paddleocr-vl", "--prune-layout"), "--prune-layout means nothing to --engine paddleocr-vl"),
    ],
)
def test_an_engine_that_is_not_served_is_refused(
    parse: Any, tmp_path: Path, capsys: Capture, arguments: tuple[str, ...], said: str
) -> None:
    picture(FIRST).save(tmp_path / "a.png")
    assert parse(DocumentReader(), tmp_path / "a.png", *arguments) == 2
    assert said in capsys.readouterr().err


def test_options_reach_every_request(parse: Any, tmp_path: Path) -> None:
    reader = DocumentReader()
    picture(FIRST).save(tmp_path / "a.png")
    assert parse(reader, tmp_path / "a.png", "--priority", "7", "--max-tokens", "30", "--timeout", "50") == 0
    asked = [json.loads(request.sampling or "") for request, *_ in reader.requests]
    assert [(each["priority"], each["max_tokens"]) for each in asked] == [(7, 30)] * 4
    assert all(49 < (timeout or 0) <= 50 for *_, timeout in reader.requests)


def policies(reader: DocumentReader) -> list[Any]:
    """Of the questions so far, layouts first."""
    asked = sorted(reader.requests, key=lambda each: "Layout" not in (each[0].messages or ""))
    return [json.loads(request.sampling or "").get("tile_policy") for request, *_ in asked]


def test_steps_are_asked_about_without_equal_groups(parse: Any, tmp_path: Path) -> None:
    """Each step where that is wanted, and pages again that were read otherwise."""
    picture(FIRST).save(tmp_path / "a.png")
    pruned = {"prune": "equal"}
    for options, layout, crops in (
        ((), None, None),
        (("--prune-crops",), None, pruned),
        (("--prune-layout",), pruned, None),
        (("--prune-layout", "--prune-crops"), pruned, pruned),
    ):
        for asked in ([layout, crops, crops, crops], []):
            reader = DocumentReader()
            assert parse(reader, tmp_path / "a.png", *options) == 0 and policies(reader) == asked
    finder, reader = DocumentReader(LAYOUT.replace("title", "chart")), ElementReader()
    engine = ("--engine", "paddleocr-vl", "--layout-url", "layout:1", "--prune-crops")
    assert parse(reader, tmp_path / "a.png", *engine, "--force", layout=finder) == 0
    assert policies(reader) == [pruned] * 3 and policies(finder) == [None]


OTHER = ServedModel("f" * 32, "qwen2_vl")


def test_pages_of_another_model_are_refused_and_force_reads_them(parse: Any, tmp_path: Path, capsys: Capture) -> None:
    write_pdf(tmp_path / "a.pdf", [FIRST])
    first, reader = tmp_path / "out" / "a.pdf" / "page-0001.json", DocumentReader()
    assert parse(reader, tmp_path / "a.pdf") == 0
    reader.model = OTHER
    assert parse(reader, tmp_path / "a.pdf") == 2 and reader.pages_asked == 1
    said = capsys.readouterr().err
    assert "another model than qwen2_vl, checkpoint ffffffff has read 1 of the pages" in said and "--force" in said
    assert parse(reader, tmp_path / "a.pdf", "--force") == 0 and reader.pages_asked == 2
    page = page_of(first)
    assert page["made_from"].pop("checkpoint") == "f" * 32
    # A page of an earlier version is kept, and it is said.
    first.write_text(json.dumps(page))
    assert parse(reader, tmp_path / "a.pdf") == 0 and reader.pages_asked == 2
    assert "1 pages in" in (said := capsys.readouterr().err) and "they are kept; --force reads them again" in said
    assert parse(reader, tmp_path / "a.pdf", "--force") == 0 and reader.pages_asked == 3
    # Other settings are another matter: these pages are read again anyway.
    assert parse(DocumentReader(), tmp_path / "a.pdf", "--dpi", "51") == 0


def test_a_model_that_changes_while_pages_are_read_ends_the_run(parse: Any, tmp_path: Path, capsys: Capture) -> None:
    class Changing(DocumentReader):
        """Starts again with another model."""

        def answer_to(self, request: Request) -> Sequence[Any]:
            if self.pages_asked == 2 and self.model != OTHER:
                self.model = OTHER
                return [Unavailable("not yet")]
            return super().answer_to(request)

    write_pdf(tmp_path / "a.pdf", [FIRST, SECOND, THIRD])
    assert parse(Changing(), tmp_path / "a.pdf", "--concurrency", "1") == 2
    assert "serves another model (qwen2_vl, checkpoint ffffffff)" in capsys.readouterr().err
    assert not (tmp_path / "out" / "a.pdf" / "page-0002.json").exists()


def test_a_document_that_shrank_loses_its_old_pages(parse: Any, tmp_path: Path) -> None:
    write_pdf(tmp_path / "a.pdf", [FIRST, SECOND])
    assert parse(DocumentReader(), tmp_path / "a.pdf") == 0
    (tmp_path / "out" / "a.pdf" / "page-notes.md").write_text("mine")
    write_pdf(tmp_path / "a.pdf", [THIRD])
    assert parse(DocumentReader(), tmp_path / "a.pdf") == 0
    names = ["document.md", "page-0001.jpg", "page-0001.json", "page-0001.md", "page-notes.md"]
    assert sorted(path.name for path in (tmp_path / "out" / "a.pdf").iterdir()) == names


@pytest.mark.parametrize(("name", "asked"), [("page-0001.md", 0), ("document.md", 0), ("page-0001.jpg", 1)])
def test_a_file_that_is_gone_is_made_again(parse: Any, tmp_path: Path, name: str, asked: int) -> None:
    write_pdf(tmp_path / "a.pdf", [FIRST, SECOND])
    assert parse(DocumentReader(), tmp_path / "a.pdf") == 0
    path = tmp_path / "out" / "a.pdf" / name
    before = path.read_bytes()
    path.unlink()
    reader, others = DocumentReader(), {each: each.stat().st_mtime_ns for each in path.parent.iterdir()}
    assert parse(reader, tmp_path / "a.pdf") == 0
    assert path.read_bytes() == before and reader.pages_asked == asked
    assert asked or {each: each.stat().st_mtime_ns for each in others} == others, "what was there is not written"


def test_an_output_that_cannot_be_written_or_is_another_runs(parse: Any, tmp_path: Path, capsys: Capture) -> None:
    picture(FIRST).save(tmp_path / "a.png")
    out, reader = tmp_path / "out", DocumentReader()
    out.write_text("in the way")
    assert parse(reader, tmp_path / "a.png") == 1 and "cannot write the results: " in capsys.readouterr().err
    out.unlink()
    with closing(OutputFolder(out)):
        assert parse(reader, tmp_path / "a.png") == 2 and reader.pages_asked == 0
    assert f"another run is writing {out}" in capsys.readouterr().err and parse(reader, tmp_path / "a.png") == 0


@pytest.mark.parametrize("gone", ["out", "out/a.pdf/page-0001.md", "cut"])
def test_results_that_go_while_pages_are_read_end_the_run(
    parse: Any, tmp_path: Path, capsys: Capture, gone: str
) -> None:
    class Meddling(DocumentReader):
        def answer_to(self, request: Request) -> Sequence[Any]:
            if self.pages_asked == 3 and "Layout" in (request.messages or ""):
                path = tmp_path / gone
                if gone == "cut":
                    os.truncate(tmp_path / "out" / "a.pdf" / "page-0001.json", 20)
                elif path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            return super().answer_to(request)

    write_pdf(tmp_path / "a.pdf", [FIRST, SECOND, THIRD])
    assert parse(Meddling(), tmp_path / "a.pdf", "--concurrency", "1") == 1
    said = capsys.readouterr().err
    assert "cannot write the results: " in said and ("while this run" in said or "during this run" in said)


def test_a_model_that_reads_no_documents_is_said(parse: Any, tmp_path: Path, capsys: Capture) -> None:
    write_pdf(tmp_path / "a.pdf", [FIRST])
    reader = DocumentReader(known="yes")
    reader.model = ServedModel("0" * 32, "internvl")
    assert parse(reader, tmp_path / "a.pdf") == 2 and reader.pages_asked == 0
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "(internvl, checkpoint 00000000) reads no documents" in said[0]
    assert "tessera serve --default documents" in said[0]


def test_some_pages(parse: Any, tmp_path: Path) -> None:
    write_pdf(tmp_path / "a.pdf", [FIRST, SECOND, THIRD, FIRST])
    picture(FIRST).save(tmp_path / "b.png")
    reader = DocumentReader()
    assert parse(reader, tmp_path / "a.pdf", tmp_path / "b.png", "--pages", "2,4-9") == 1  # which b.png has not
    assert reader.pages_asked == 2
    marks = [line for line in (tmp_path / "out" / "a.pdf" / "document.md").read_text().splitlines() if "<!--" in line]
    assert marks == ["<!-- page 2 -->", "<!-- page 4 -->"]
    rows = error_rows(tmp_path / "out")
    assert [(Path(row["file"]).name, row["error"]) for row in rows] == [
        ("b.png", "it has 1 pages, and none of --pages")
    ]
    # The others are read when they are wanted.
    assert parse(reader, tmp_path / "a.pdf") == 0 and reader.pages_asked == 4


def test_ranges_of_pages() -> None:
    assert PageRanges("3, 1-2,2-3 ,7-").of(8) == [0, 1, 2, 6, 7] and PageRanges("9-").of(8) == []
    for wrong in ("", "0", "2-1", "a", "1-2-3", "-3", "1,,2"):
        with pytest.raises(InvalidRequest, match="is no page or range of pages"):
            PageRanges(wrong)


def test_a_password_opens_an_encrypted_pdf(parse: Any, tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "a.pdf", [FIRST])
    path.write_bytes(path.read_bytes().replace(b"/Root", LOCK.encode()))
    assert parse(DocumentReader(), path, "--password", "wrong") == 1
    words = "the PDF is encrypted and is not opened by the password that was given"
    assert [row["error"] for row in error_rows(tmp_path / "out")] == [words]
    assert parse(DocumentReader(), path, "--password", "sesame") == 0
    # What is drawn is no cipher, so that none of it is seen.
    assert contents(tmp_path / "out" / "a.pdf" / "page-0001.json")[:2] == ["white words"] * 2
