"""Where rows come from: JSON lines, a folder of pictures, a parquet table. Read lazily, and the same each time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tessera_batch.rows import FIELDS, Asked, Mask, Row, Source, check_id, located
from tessera_wire.errors import InvalidRequest
from tessera_wire.nearest import missing

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
"""Of the files in a folder that count."""


def open_source(path: Path, asked: Asked) -> Source:
    """The source at a path, by what is there and its suffix. Raises InvalidRequest."""
    if path.is_dir():
        return FolderSource(path, asked)
    if not path.is_file():
        raise InvalidRequest(missing(path))
    if path.suffix == ".parquet":
        from tessera_batch.table import TableSource

        return TableSource(path, asked)
    if path.suffix == ".jsonl":
        return JsonLinesSource(path, asked)
    raise InvalidRequest(f"{path} is no source of rows", "give a .jsonl, a .parquet or a folder of pictures")


class JsonLinesSource:
    """An object a line: ``image`` (a path, relative to the file's folder, a ``data:`` URL, a list of them, or null for
    a question without a picture), and where wanted ``id``, ``question`` and ``options``. Without ids, lines are
    known by their numbers from 1."""

    def __init__(self, path: Path, asked: Asked) -> None:
        self.path, self._asked = path, asked
        self._folder = str(path.resolve().parent)
        self.passed_over: tuple[str, ...] = ()

    def rows(self, wanted: Mask | None = None) -> Iterator[Row]:
        number, named = 0, None
        with open(self.path, "rb") as file:
            for place, line in enumerate(file, 1):
                if not line.strip():
                    continue
                if wanted is None or wanted[number]:
                    try:
                        fields = _object(line)
                        if named is None:
                            named = "id" in fields
                            self.passed_over = tuple(name for name in fields if name not in FIELDS)
                        own = line if named else b"%d %b" % (place, line)
                        yield self._row(number, place, fields, named, own.rstrip())
                    except InvalidRequest as error:
                        raise InvalidRequest(f"{self.path}, line {place}: {error.message}", error.remedy) from None
                number += 1

    def _row(self, number: int, place: int, fields: dict[str, Any], named: bool, own: bytes) -> Row:
        if named:
            check_id(fields.get("id"))
        else:
            if "id" in fields:
                raise InvalidRequest("it has an id, and rows before it have none", "give all rows one, or none")
            fields["id"] = place
        if "image" not in fields:
            raise InvalidRequest(
                f"it has no field 'image', only {', '.join(fields)}", "write null for a question without a picture"
            )
        given = fields["image"]
        images = [] if given is None else given if isinstance(given, list) else [given]
        return self._asked.row(number, fields, tuple([located(image, self._folder) for image in images]), own)


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
                    try:
                        yield self._asked.row(number, {"id": named}, (path,), os.fsencode(named))
                    except InvalidRequest as error:
                        raise InvalidRequest(f"{path}: {error.message}", error.remedy) from None
                number += 1
        if not number:
            raise InvalidRequest(f"{self.path} holds no pictures", f"of a folder, these count: {' '.join(SUFFIXES)}")
