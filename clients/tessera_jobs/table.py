"""Parquet: rows from a table, and a journal as one. Needs pyarrow."""

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from tessera_jobs.journal import replaced
from tessera_jobs.rows import FIELDS, Mask, Options, Row, Source
from tessera_wire.errors import InvalidRequest, TesseraClientError

try:
    import pyarrow as arrow
    from pyarrow import parquet
except ImportError as error:
    remedy = "pip install '.[tables]' in Tessera's source"  # another's package has the name tessera on PyPI
    raise TesseraClientError(f"parquet needs pyarrow: {error}", remedy) from error

BATCH = 64  # rows that are read at a time
GROUP = 16_384  # rows of a row group that is written


class TableSource(Source):
    """A table with the columns ``image`` and where wanted ``id``, ``question`` and ``options`` (a struct).

    A picture is a path relative to the table's folder, a ``data:`` URL, an encoded file's bytes, or a struct of
    ``bytes`` and ``path`` as Hugging Face's datasets has it; a cell may also be a list of them, or null. Without ids,
    rows are known by their numbers from 1. Only the row groups that hold wanted rows are read.
    """

    def __init__(self, path: Path, question: str | None = None, options: Options = None) -> None:
        super().__init__(path, question, options)
        try:
            with parquet.ParquetFile(path) as table:
                schema, footer = table.schema_arrow, table.metadata
        except (arrow.ArrowException, OSError) as error:
            raise InvalidRequest(f"{path} cannot be read as parquet: {error}") from None
        self.passed_over = tuple(name for name in schema.names if name not in FIELDS)
        if "image" not in schema.names:
            raise InvalidRequest(f"{path} has no column 'image', only {', '.join(schema.names)}")
        self._columns = [name for name in FIELDS if name in schema.names]
        self._named = "id" in self._columns
        self._inside = not _is_text(schema.field("image").type)
        self._files = (str(path),) if self._inside else ()
        # Stands for the bytes of pictures, which are not read only to know the rows by them.
        places = [footer.row_group(group).to_dict() for group in range(footer.num_row_groups)]
        self._contents = blake2b(repr((footer.created_by, places)).encode(), digest_size=8).hexdigest()

    def rows(self, wanted: Mask | None = None) -> Iterator[Row]:
        columns = [name for name in self._columns if wanted is not None or not self._inside or name != "image"]
        first = 0
        with parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=1 << 20) as table:
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                if wanted is None or wanted[first : first + rows].any():
                    batches = table.iter_batches(BATCH if "image" in columns else 4096, [group], columns)
                    yield from self._rows(batches, first, wanted)
                first += rows

    def _rows(self, batches: Iterable[Any], first: int, wanted: Mask | None) -> Iterator[Row]:
        for batch in batches:
            if wanted is None or wanted[first : first + batch.num_rows].any():
                for number, fields in enumerate(batch.to_pylist() or [{}] * batch.num_rows, first):
                    if wanted is None or wanted[number]:
                        yield self._row_or_error(number, number + 1, b"", fields)
            first += batch.num_rows

    def _row(self, number: int, place: Any, own: bytes, given: Any) -> Row:
        self._identify(given, place)
        told: dict[str, Any] = {name: given[name] for name in ("id", "question", "options") if name in given}
        told["image"] = self._contents if self._inside else given.get("image")
        return self._made(number, given, repr(told).encode())

    def _image(self, image: Any) -> Any:
        if isinstance(image, Mapping):
            image = image.get("bytes") or image.get("path")
        return image if isinstance(image, bytes) else super()._image(image)


def _is_text(kind: Any) -> bool:
    """Whether a column of pictures holds nothing but paths and URLs."""
    if arrow.types.is_list(kind) or arrow.types.is_large_list(kind):
        kind = kind.value_type
    return arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_dictionary(kind)


def write_table(results: Iterable[dict[str, Any]], out: Path, id_type: type) -> None:
    """Results as a table, which appears under its name when it is whole. Raises OSError.

    Columns: those of a result (:mod:`tessera_jobs.journal`); ``logprobs`` as JSON text.
    """
    name = arrow.int64() if id_type is int else arrow.string()
    score = arrow.struct([("label", arrow.string()), *((f, arrow.float64()) for f in SCORES)])
    counts = [(f"{kind}_tokens", arrow.int32()) for kind in ("prompt", "image", "completion")]
    texts = [(field, arrow.string()) for field in ("answer", "error", "finish_reason")]
    cascade = arrow.struct([("margin", arrow.float64()), ("escalated", arrow.bool_())])
    last = [(field, arrow.string()) for field in ("logprobs", "fingerprint", "asked", "content", "stat", "checkpoint")]
    decided = [("choices", arrow.list_(score)), ("cascade", cascade)]
    schema = arrow.schema([("id", name), *texts, *counts, *decided, ("same_as", name), *last])
    waiting = iter(results)
    with replaced(out) as file, parquet.ParquetWriter(file, schema) as table:
        while rows := list(islice(waiting, GROUP)):
            for row in rows:
                if "logprobs" in row:
                    row["logprobs"] = json.dumps(row["logprobs"])
                for field, value in row.items():
                    if isinstance(value, str):  # a file's name need not be UTF-8; a column of text must
                        row[field] = value.encode(errors="replace").decode()
            table.write_batch(arrow.RecordBatch.from_pylist(rows, schema))


SCORES = ("logprob", "probability", "normalized")


def read_table(path: Path) -> Iterator[dict[str, Any]]:
    """The results that :func:`write_table` wrote. Raises InvalidRequest where there are none."""
    try:
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(BATCH):
                for row in batch.to_pylist():
                    row = {key: value for key, value in row.items() if value is not None or key in ("answer", "error")}
                    yield row | ({"logprobs": json.loads(row["logprobs"])} if "logprobs" in row else {})
    except (arrow.ArrowException, ValueError) as error:
        raise InvalidRequest(f"{path} holds no results: {error}", "give another -o, or remove it") from None
