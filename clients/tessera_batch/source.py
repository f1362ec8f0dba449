"""Where rows come from: JSON lines, CSV, a folder of pictures, a parquet table. Read lazily, and the same each time."""

from __future__ import annotations

import atexit
import csv
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tessera_batch.openai_lines import MESSAGES, is_batch_line, row_fields
from tessera_batch.rows import FIELDS, Asked, Mask, Row, Source, check_id, located
from tessera_wire.errors import InvalidRequest
from tessera_wire.nearest import missing

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
"""Of the files in a folder that count."""


def open_source(path: Path, asked: Asked) -> Source:
    """The source at a path, by what is there and its suffix; ``-`` is standard input. Raises InvalidRequest."""
    if str(path) == "-":
        return JsonLinesSource(path, asked, spooled(sys.stdin.buffer))
    if path.is_dir():
        return FolderSource(path, asked)
    if not path.is_file():
        if path.exists():
            raise InvalidRequest(f"{path} is neither a file nor a folder", "- reads lines from standard input")
        raise InvalidRequest(missing(path))
    if path.suffix == ".parquet":
        from tessera_batch.table import TableSource

        return TableSource(path, asked)
    if path.suffix == ".jsonl":
        return JsonLinesSource(path, asked)
    if path.suffix == ".csv":
        return CsvSource(path, asked)
    raise InvalidRequest(f"{path} is no source of rows", "give a .jsonl, .csv or .parquet, a folder of pictures, or -")


def spooled(stream: BinaryIO) -> Path:
    """A file of what a stream holds, for it is gone through several times. It is removed when this process ends."""
    with tempfile.NamedTemporaryFile(prefix="tessera-batch-", suffix=".jsonl", delete=False) as file:
        atexit.register(Path(file.name).unlink, missing_ok=True)
        shutil.copyfileobj(stream, file, 1 << 20)
    return Path(file.name)


class JsonLinesSource:
    """An object a line: ``image`` (a path, relative to the file's folder, a ``data:`` URL, a list of them, or null for
    a question without a picture), and where wanted ``id``, ``question`` and ``options``. Or OpenAI's lines of a batch
    (:mod:`tessera_batch.openai_lines`). Without ids, lines are known by their numbers from 1.

    Args:
        lines: where they are, if not at ``path``; paths of pictures are then relative to the current folder.
    """

    def __init__(self, path: Path, asked: Asked, lines: Path | None = None) -> None:
        self.path, self._asked = path, asked
        self._lines = lines or path
        self._where = f"{path}, line" if lines is None else "standard input, line"
        self._folder = str(path.resolve().parent) if lines is None else os.getcwd()
        self._named: bool | None = None
        self.passed_over: tuple[str, ...] = ()

    def rows(self, wanted: Mask | None = None) -> Iterator[Row]:
        number = 0
        with open(self._lines, "rb") as file:
            for place, line in enumerate(file, 1):
                if not line.strip():
                    continue
                if wanted is None or wanted[number]:
                    try:
                        yield self._row(number, place, _object(line), line)
                    except InvalidRequest as error:
                        yield self._asked.wrong(number, f"{self._where} {place}", error, line.rstrip())
                number += 1

    def _row(self, number: int, place: int, fields: dict[str, Any], line: bytes) -> Row:
        batched = is_batch_line(fields)
        if batched:
            fields = row_fields(fields)
        if self._named is None:
            self._named = "id" in fields
            self.passed_over = tuple(name for name in fields if name not in (*FIELDS, *MESSAGES))
        if self._named:
            check_id(fields.get("id"))
        elif "id" in fields:
            raise InvalidRequest("it has an id, and rows before it have none", "give all rows one, or none")
        else:
            fields["id"] = place
        own = (line if self._named else b"%d %b" % (place, line)).rstrip()
        if batched:
            return self._asked.conversation(number, fields, own)
        if "image" not in fields:
            raise InvalidRequest(
                f"it has no field 'image', only {', '.join(fields)}", "write null for a question without a picture"
            )
        given = fields["image"]
        images = [] if given is None else given if isinstance(given, list) else [given]
        return self._asked.row(number, fields, tuple([located(image, self._folder) for image in images]), own)


class CsvSource:
    """A table of text with a header: ``image`` (a path, relative to the file's folder, or a ``data:`` URL; empty for a
    question without a picture), and where wanted ``id``, ``question`` and ``options`` (a JSON object). Without ids,
    rows are known by their numbers from 1."""

    def __init__(self, path: Path, asked: Asked) -> None:
        self.path, self._asked = path, asked
        self._folder = str(path.resolve().parent)
        with self._open() as file:
            self._header = next(csv.reader(file), [])
        if "image" not in self._header or len(set(self._header)) < len(self._header):
            names = ", ".join(self._header)
            raise InvalidRequest(
                f"{path} needs a first line of names with one 'image' among them; it has {names[:200]}"
            )
        self.passed_over = tuple(name for name in self._header if name not in FIELDS)

    def _open(self) -> Any:
        return open(self.path, encoding="utf-8-sig", errors="surrogateescape", newline="")

    def rows(self, wanted: Mask | None = None) -> Iterator[Row]:
        with self._open() as file:
            cells = csv.reader(file, strict=True)
            next(cells, None)
            number = 0
            while True:
                try:
                    row = next(cells)
                except StopIteration:
                    return
                except csv.Error as error:  # what follows cannot be told apart
                    words = f"{self.path}, line {cells.line_num}: not CSV: {error}"
                    raise InvalidRequest(words, "is a quote missing?") from None
                if not row:
                    continue
                if wanted is None or wanted[number]:
                    own = repr(row).encode(errors="surrogateescape")
                    try:
                        yield self._row(number, row, own)
                    except InvalidRequest as error:
                        yield self._asked.wrong(number, f"{self.path}, row {number + 1}", error, own)
                number += 1

    def _row(self, number: int, cells: list[str], own: bytes) -> Row:
        if len(cells) != len(self._header):
            raise InvalidRequest(f"it has {len(cells)} cells; the first line names {len(self._header)}")
        fields: dict[str, Any] = {name: cell for name, cell in zip(self._header, cells) if cell}
        if "id" in self._header:
            check_id(fields.get("id"))
        else:
            fields["id"] = number + 1
            own = b"%d %b" % (number, own)
        if "options" in fields:
            fields["options"] = _object(fields["options"].encode(errors="surrogateescape"))
        images = (located(fields["image"], self._folder),) if "image" in fields else ()
        return self._asked.row(number, fields, images, own)


_decode = json.JSONDecoder().decode


def _object(line: bytes) -> dict[str, Any]:
    try:
        fields = _decode(line.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"not a JSON object: {line[:80].decode('utf-8', 'replace')!r}")
    return fields


class FolderSource:
    """The pictures in a folder and below, in order of their names, known by their paths from there. What is hidden is
    passed over."""

    passed_over: Sequence[str] = ()

    def __init__(self, path: Path, asked: Asked) -> None:
        self.path, self._asked = path, asked

    def rows(self, wanted: Mask | None = None) -> Iterator[Row]:
        number = 0
        for where, folders, files in os.walk(self.path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            below = os.path.relpath(where, self.path)
            for name in sorted(files):
                if not name.lower().endswith(SUFFIXES) or name.startswith("."):
                    continue
                if wanted is None or wanted[number]:
                    path = os.path.join(where, name)
                    named = name if below == "." else f"{below}/{name}"
                    own = os.fsencode(named)
                    try:
                        yield self._asked.row(number, {"id": named}, (path,), own)
                    except InvalidRequest as error:
                        yield self._asked.wrong(number, path, error, own)
                number += 1
        if not number:
            raise InvalidRequest(f"{self.path} holds no pictures", f"of a folder, these count: {' '.join(SUFFIXES)}")
