"""Where rows come from: JSON lines, CSV, a folder of pictures, a parquet table. Read lazily, and the same each time.

A line of OpenAI's batch files, ``{"custom_id", "method", "url", "body"}``, as a row: such as the gateway's Batch API
takes. What the body holds and has no meaning here is refused by name.
"""

import atexit
import csv
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from tessera_client.messages import SAME_NAME
from tessera_jobs.rows import FIELDS, Options, Row, Source
from tessera_wire.command_line import missing
from tessera_wire.errors import InvalidRequest

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
"""Of the files in a folder that count."""


def open_source(path: Path, question: str | None = None, options: Options = None) -> Source:
    """The source at a path, by what is there and its suffix; ``-`` is standard input. The rest is as of
    :class:`Source`. Raises InvalidRequest."""
    if str(path) == "-":
        return JsonLinesSource(path, question, options, lines=spooled(sys.stdin.buffer))
    if path.is_dir():
        return FolderSource(path, question, options)
    if not path.is_file():
        if path.exists():
            raise InvalidRequest(f"{path} is neither a file nor a folder", "- reads lines from standard input")
        raise InvalidRequest(missing(path))
    if path.suffix == ".parquet":
        from tessera_jobs.table import TableSource

        return TableSource(path, question, options)
    if path.suffix in (".jsonl", ".csv"):
        return (JsonLinesSource if path.suffix == ".jsonl" else CsvSource)(path, question, options)
    raise InvalidRequest(f"{path} is no source of rows", "give a .jsonl, .csv or .parquet, a folder of pictures, or -")


def spooled(stream: BinaryIO) -> Path:
    """A file of what a stream holds, for it is gone through several times. It is removed when this process ends."""
    with tempfile.NamedTemporaryFile(prefix="tessera-batch-", suffix=".jsonl", delete=False) as file:
        atexit.register(Path(file.name).unlink, missing_ok=True)
        shutil.copyfileobj(stream, file, 1 << 20)
    return Path(file.name)


class JsonLinesSource(Source):
    """An object a line: ``image`` (a path, relative to the file's folder, a ``data:`` URL, a list of them, or null for
    a question without a picture), and where wanted ``id``, ``question`` and ``options``. Or OpenAI's lines of a batch
    (:mod:`tessera_jobs.source`). Without ids, lines are known by their numbers from 1.

    Args:
        lines: where they are, if not at ``path``; paths of pictures are then relative to the current folder.
    """

    unit = "line"

    def __init__(
        self, path: Path, question: str | None = None, options: Options = None, lines: Path | None = None
    ) -> None:
        super().__init__(path, question, options)
        if lines is not None:
            self.where, self.folder = "standard input, line ", os.getcwd()
        self._lines, self._named = lines or path, None

    def _read(self) -> Iterator[tuple[int | str, bytes, Any]]:
        with open(self._lines, "rb") as file:
            for place, line in enumerate(file, 1):
                if own := line.rstrip():
                    yield place, own, line

    def _row(self, number: int, place: Any, own: bytes, given: Any) -> Row:
        fields = _object(given)
        if batched := "body" in fields and "image" not in fields:
            fields = row_fields(fields)
        if self._named is None:
            self._named = "id" in fields
            self.passed_over = tuple(name for name in fields if name not in (*FIELDS, "messages"))
        if not self._named:
            if "id" in fields:
                raise InvalidRequest("it has an id, and rows before it have none", "give all rows one, or none")
            own = b"%d %b" % (place, own)
        self._identify(fields, place)
        if batched:
            return self._made(number, fields, own, fields["messages"])
        if "image" not in fields:
            raise InvalidRequest(
                f"it has no field 'image', only {', '.join(fields)}", "write null for a question without a picture"
            )
        return self._made(number, fields, own)


class CsvSource(Source):
    """A table of text with a header: ``image`` (a path, relative to the file's folder, or a ``data:`` URL; empty for a
    question without a picture), and where wanted ``id``, ``question`` and ``options`` (a JSON object). Without ids,
    rows are known by their numbers from 1."""

    def __init__(self, path: Path, question: str | None = None, options: Options = None) -> None:
        super().__init__(path, question, options)
        with self._open() as file:
            self._header = next(csv.reader(file), [])
        if "image" not in self._header or len(set(self._header)) < len(self._header):
            names = ", ".join(self._header)
            raise InvalidRequest(
                f"{path} needs a first line of names with one 'image' among them; it has {names[:200]}"
            )
        self._named = "id" in self._header
        self.passed_over = tuple(name for name in self._header if name not in FIELDS)

    def _open(self) -> Any:
        return open(self.path, encoding="utf-8-sig", errors="surrogateescape", newline="")

    def _read(self) -> Iterator[tuple[int | str, bytes, Any]]:
        with self._open() as file:
            lines = csv.reader(file, strict=True)
            try:
                for place, cells in enumerate(filter(None, islice(lines, 1, None)), 1):
                    yield place, repr(cells).encode(errors="surrogateescape"), cells
            except csv.Error as error:  # what follows cannot be told apart
                words = f"{self.path}, line {lines.line_num}: not CSV: {error}"
                raise InvalidRequest(words, "is a quote missing?") from None

    def _row(self, number: int, place: Any, own: bytes, given: Any) -> Row:
        if len(given) != len(self._header):
            raise InvalidRequest(f"it has {len(given)} cells; the first line names {len(self._header)}")
        fields: dict[str, Any] = {name: cell for name, cell in zip(self._header, given) if cell}
        self._identify(fields, place)
        if not self._named:
            own = b"%d %b" % (number, own)
        if "options" in fields:
            fields["options"] = _object(fields["options"].encode(errors="surrogateescape"))
        return self._made(number, fields, own)


def below(folder: Path, suffixes: tuple[str, ...], but: Path | None = None) -> Iterator[str]:
    """The files in a folder and below that end so, in order of their names; not what is hidden, nor the folder ``but``,
    which is absolute."""
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != "." and but != Path(where, name).resolve())
        for name in sorted(files):
            if name.lower().endswith(suffixes) and not name.startswith("."):
                yield os.path.join(where, name)


_decode = json.JSONDecoder().decode


def _object(line: bytes) -> dict[str, Any]:
    try:
        fields = _decode(line.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"not a JSON object: {line[:80].decode('utf-8', 'replace')!r}")
    return fields


class FolderSource(Source):
    """The pictures in a folder and below, in order of their names, known by their paths from there. What is hidden is
    passed over."""

    def __init__(self, path: Path, question: str | None = None, options: Options = None) -> None:
        super().__init__(path, question, options)
        self.where = self.folder = ""

    def _read(self) -> Iterator[tuple[int | str, bytes, Any]]:
        empty = True
        for path in below(self.path, SUFFIXES):
            named, empty = os.path.relpath(path, self.path), False
            yield path, os.fsencode(named), named
        if empty:
            raise InvalidRequest(f"{self.path} holds no pictures", f"of a folder, these count: {' '.join(SUFFIXES)}")

    def _row(self, number: int, place: Any, own: bytes, given: Any) -> Row:
        return self._made(number, {"id": given, "image": place}, own)


URL = "/v1/chat/completions"
WITHOUT_EFFECT = frozenset(
    (
        *("metadata", "model", "parallel_tool_calls", "prompt_cache_key"),
        *("safety_identifier", "service_tier", "store", "user"),
    )
)
OF_ONE_ANSWER: Mapping[str, tuple[Any, ...]] = {"n": (1,), "stream": (False,), "tools": ([],), "tool_choice": ("none",)}
"""Allowed with these values, which say what is done anyway."""


def row_fields(line: Mapping[str, Any]) -> dict[str, Any]:
    """``id``, ``messages`` and ``options`` of the row. Raises InvalidRequest."""
    unknown = sorted(line.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        raise InvalidRequest(f"a line of a batch has custom_id, method, url and body, and no {', '.join(unknown)}")
    if "custom_id" not in line:
        raise InvalidRequest("it has no custom_id")
    if line.get("method", "POST") != "POST" or line.get("url", URL) != URL:
        raise InvalidRequest(f"only POST {URL} is asked here, not {line.get('method')!r} {line.get('url')!r:.80}")
    body = line["body"]
    if not isinstance(body, dict):
        raise InvalidRequest(f"its body must be an object, not {body!r:.80}")
    body = {name: value for name, value in body.items() if value is not None}
    messages = body.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(f"its body needs messages, a list that is not empty, not {messages!r:.80}")
    messages = [
        {**message, "role": "system"} if isinstance(message, dict) and message.get("role") == "developer" else message
        for message in messages
    ]
    return {"id": line["custom_id"], "messages": messages, "options": _options(body)}


def _options(body: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in body.items() if name not in WITHOUT_EFFECT}
    options = {name: rest.pop(name) for name in [*rest] if name in ("max_tokens", *SAME_NAME)}
    for name, allowed in OF_ONE_ANSWER.items():
        if name in rest and rest.pop(name) not in allowed:
            raise InvalidRequest(f"body.{name} is not served here", f"leave {name} out")
    longest = rest.pop("max_completion_tokens", None)
    if longest is not None and options.setdefault("max_tokens", longest) != longest:
        raise InvalidRequest("max_tokens and max_completion_tokens differ", "send one of them")
    logprobs, top = rest.pop("logprobs", False), rest.pop("top_logprobs", None)
    if logprobs is True:
        options["logprobs"] = top or 0
    elif logprobs is not False or top is not None:
        raise InvalidRequest("logprobs must be true or false, and top_logprobs needs logprobs: true")
    options |= _form(rest.pop("response_format", {"type": "text"}))
    own = _part("tessera", rest.pop("tessera", {}), ("choices", "regex", "tile_policy"))
    own |= _part("vllm_xargs", rest.pop("vllm_xargs", {}), ("no_repeat_ngram_size", "draft"))
    own |= _part("mm_processor_kwargs", rest.pop("mm_processor_kwargs", {}), ("min_pixels", "max_pixels"))
    if rest:
        raise InvalidRequest(f"body.{min(rest)} is not known here", f"leave {', '.join(sorted(rest))} out")
    return options | own


def _form(given: Any) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    named = given.get("json_schema") if kind == "json_schema" else None
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise InvalidRequest(
            f"body.response_format must be of type text, json_object or json_schema, not {given!r:.80}"
        )
    return {"json_schema": named["schema"]}


def _part(name: str, given: Any, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(given, dict) or given.keys() - set(known):
        raise InvalidRequest(f"body.{name} must be an object of {', '.join(known)}, not {given!r:.80}")
    return {name: value for name, value in given.items() if value is not None}
