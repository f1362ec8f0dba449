"""`tessera parse` where its results, its model or its folder are no longer what they were; and which pages it reads."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import threading
from collections.abc import Sequence
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest
from documents.document_reader import (
    FIRST,
    SECOND,
    THIRD,
    DocumentReader,
    contents,
    error_rows,
    page_of,
    picture,
    write_pdf,
)

from tessera_client import InvalidRequest, ServedModel, Unavailable
from tessera_client.messages import Request
from tessera_documents.results import OutputFolder
from tessera_documents.sources import PageRanges

Capture = pytest.CaptureFixture[str]
OTHER = ServedModel("f" * 32, "qwen2_vl")


def test_pages_of_another_model_are_refused_and_force_reads_them(parse: Any, tmp_path: Path, capsys: Capture) -> None:
    write_pdf(tmp_path / "a.pdf", [FIRST, SECOND])
    assert parse(DocumentReader(), tmp_path / "a.pdf") == 0
    reader = DocumentReader()
    reader.model = OTHER
    assert parse(reader, tmp_path / "a.pdf") == 2 and reader.pages_asked == 0
    said = capsys.readouterr().err
    assert "another model than qwen2_vl, checkpoint ffffffff has read 2 of the pages" in said and "--force" in said
    assert parse(reader, tmp_path / "a.pdf", "--force") == 0 and reader.pages_asked == 2
    assert parse(reader, tmp_path / "a.pdf") == 0 and reader.pages_asked == 2
    page = page_of(tmp_path / "out" / "a.pdf" / "page-0001.json")
    assert page["made_from"]["checkpoint"] == "f" * 32
    # Other settings are another matter: these pages are read again anyway.
    assert parse(DocumentReader(), tmp_path / "a.pdf", "--dpi", "100") == 0


def test_pages_of_an_earlier_version_are_kept_and_said(parse: Any, tmp_path: Path, capsys: Capture) -> None:
    write_pdf(tmp_path / "a.pdf", [FIRST])
    assert parse(DocumentReader(), tmp_path / "a.pdf") == 0
    path = tmp_path / "out" / "a.pdf" / "page-0001.json"
    page = json.loads(path.read_text())
    del page["made_from"]["checkpoint"]
    path.write_text(json.dumps(page))
    reader = DocumentReader()
    assert parse(reader, tmp_path / "a.pdf") == 0 and reader.pages_asked == 0
    assert "1 pages in" in (said := capsys.readouterr().err) and "they are kept; --force reads them again" in said
    assert parse(reader, tmp_path / "a.pdf", "--force") == 0 and reader.pages_asked == 1


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
    write_pdf(tmp_path / "a.pdf", [FIRST, SECOND, THIRD])
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
    reader = DocumentReader()
    assert parse(reader, tmp_path / "a.pdf") == 0
    assert path.read_bytes() == before and reader.pages_asked == asked


def test_two_runs_do_not_write_one_folder(parse: Any, tmp_path: Path, capsys: Capture) -> None:
    write_pdf(tmp_path / "a.pdf", [FIRST])
    first, reader = OutputFolder(tmp_path / "out"), DocumentReader()
    assert parse(reader, tmp_path / "a.pdf") == 2 and reader.pages_asked == 0
    assert f"another run is writing {tmp_path / 'out'}" in capsys.readouterr().err
    first.close()
    assert parse(reader, tmp_path / "a.pdf") == 0


@pytest.mark.parametrize("gone", ["out", "out/a.pdf", "out/a.pdf/page-0001.json", "cut"])
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


def test_what_is_no_file_is_an_error_row_at_once(parse: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pdf")
    (tmp_path / "zero.pdf").symlink_to("/dev/zero")
    picture(FIRST).save(tmp_path / "a.png")
    run = threading.Thread(target=parse, args=(DocumentReader(), tmp_path), daemon=True)
    run.start()
    run.join(60)
    assert not run.is_alive()
    rows = error_rows(tmp_path / "out")
    assert {Path(row["file"]).name: row["error"] for row in rows} == {
        "pipe.pdf": "it is a pipe, not a file",
        "zero.pdf": "it is a device, not a file",
    }
    assert (tmp_path / "out" / "a.png" / "document.md").is_file()


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


PAD = bytes.fromhex("28bf4e5e4e758a4164004e56fffa01082e2e00b6d0683e802f0ca9fe6453697a")


def rc4(key: bytes, data: bytes) -> bytes:
    state, j, out = list(range(256)), 0, bytearray()
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    i = j = 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        out.append(byte ^ state[(state[i] + state[j]) % 256])
    return bytes(out)


def locked(pdf: bytes, password: str) -> bytes:
    """Encrypted by the standard handler's oldest revision: RC4 of 40 bits."""
    user = (password.encode() + PAD)[:32]
    owner = rc4(md5(user).digest()[:5], user)
    key = md5(user + owner + struct.pack("<i", -4) + bytes(2)).digest()[:5]

    def stream(found: re.Match[bytes]) -> bytes:
        of_object = md5(key + int(found[2]).to_bytes(3, "little") + bytes(2)).digest()[:10]
        return found[1] + rc4(of_object, found[3]) + found[4]

    pdf = re.sub(rb"((\d+) 0 obj\n<< /Length \d+ >>\nstream\n)(.*?)(\nendstream)", stream, pdf, flags=re.DOTALL)
    fields = f"/Filter /Standard /V 1 /R 2 /P -4 /O <{owner.hex()}> /U <{rc4(key, PAD).hex()}>"
    return pdf.replace(b"/Root", f"/ID [<0000><0000>] /Encrypt << {fields} >> /Root".encode())


def test_a_password_opens_an_encrypted_pdf(parse: Any, tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "a.pdf", [FIRST])
    path.write_bytes(locked(path.read_bytes(), "sesame"))
    for words, options in (
        ("the PDF is encrypted and wants a password", ()),
        ("the PDF is encrypted and is not opened by the password that was given", ("--password", "wrong")),
    ):
        assert parse(DocumentReader(), path, *options) == 1
        assert [row["error"] for row in error_rows(tmp_path / "out")] == [words]
    assert parse(DocumentReader(), path, "--password", "sesame") == 0
    assert contents(tmp_path / "out" / "a.pdf" / "page-0001.json")[:2] == ["red words", "green words"]
