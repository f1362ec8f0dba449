"""Which rows there are, and which of them are over: known before the first is asked. :class:`ResumeIndex`.

What a row's answer depends on, and the rows for which that is no longer what it was.
"""

from array import array
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import islice

import numpy as np

from tessera_client.pictures import encode_images
from tessera_jobs.journal import Journal
from tessera_jobs.rows import Id, Mask, Row, Source, without_priority
from tessera_wire.errors import InvalidRequest

LINES = 1 << 12  # that are matched at a time
LINE = np.dtype("i8, u8, u8, u8, S16, ?, ?")
LINE.names = ("place", "asked", "content", "stat", "checkpoint", "answered", "named")
"""What is kept of a line: where it begins; ``asked``; half of ``content`` (0 but for an answer that others may take);
``stat`` (0 where it has none) and ``checkpoint`` (empty where it has none); whether it has an answer, and its row an
id."""
LOW = (1 << 32) - 1  # the half of a stat that is kept of every row


class ResumeIndex:
    """Reads the source and the journal once each.

    Args:
        journal: None where nothing has been asked yet.

    Raises InvalidRequest for a source without rows, or with none that can be asked, an id that stands twice, and a
    journal of another job.
    """

    def __init__(self, source: Source, journal: Journal | None = None) -> None:
        self._source = source
        self.id_type: type = str
        """Of all ids."""
        self.asked, self._stats = self._read()
        """uint64 [rows]: each row's digest."""
        if journal is None:
            self._forget()
        else:
            self.match(journal)

    def _forget(self) -> None:
        self.places = np.full(len(self.asked), -1, np.int64)
        """int64 [rows]: where a row's line of the journal begins; -1 where it has none."""
        self.answers = Answers(len(self.asked))
        """Those of the journal."""
        self.errors = 0
        """Rows of the journal that have no answer."""
        self.checkpoints: Counter[bytes] = Counter()
        """How many lines of the journal came from each; b"" for those that do not say it."""
        self.mended: list[int] = []
        """Where lines of the journal begin that are of rows which could not be asked, and are there no longer."""
        self.touched = np.zeros(len(self.asked), bool)
        """Rows whose pictures' files are not as they were when the journal's line was written."""

    def _read(self) -> tuple[np.ndarray, np.ndarray]:
        ids, asked, stats = array("q"), array("Q"), array("I")
        wrong = None
        for row in self._source.rows():
            asked.append(row.asked)
            stats.append(row.stat & LOW)
            if row.id is None:
                wrong = wrong or row.error
                continue
            if not ids:
                self.id_type = type(row.id)
            elif not isinstance(row.id, self.id_type):
                raise InvalidRequest(
                    f"{self._source.path}: the id {row.id!r:.80} of row {row.number + 1} is no {self.id_type.__name__}",
                    "give all rows ids of one type",
                )
            ids.append(hash(row.id))
        if not ids:
            raise wrong or InvalidRequest(f"{self._source.path} holds no rows")
        values, counts = np.unique(np.frombuffer(ids, np.int64), return_counts=True)
        self._refuse_doubled(set(values[counts > 1].tolist()))
        return np.frombuffer(asked, np.uint64), np.frombuffer(stats, np.uint32)

    def _refuse_doubled(self, hashes: set[int]) -> None:
        first: dict[Id, int] = {}
        for row in self._source.rows() if hashes else ():
            if row.id is not None and hash(row.id) in hashes and first.setdefault(row.id, row.number) != row.number:
                both = f"rows {first[row.id] + 1} and {row.number + 1} have the same id {row.id!r:.80}"
                raise InvalidRequest(f"{self._source.path}: {both}", "give each row its own id")

    def match(self, journal: Journal) -> None:
        """Finds each line's row."""
        self._forget()
        order, lines = np.argsort(self.asked), journal.lines()
        while len(some := np.fromiter(islice(lines, LINES), LINE)):
            rows = order[np.searchsorted(self.asked, some["asked"], sorter=order).clip(max=len(order) - 1)]
            known = self.asked[rows] == some["asked"]
            self._refuse(journal, some[~known & some["named"]], "which this job does not ask, or asks otherwise")
            self.mended += some["place"][~known].tolist()
            rows, some = rows[known], some[known]
            before = self.places[rows] >= 0
            self.places[rows] = some["place"]
            self._refuse(journal, some[before | (self.places[rows] != some["place"])], "twice")
            self.touched[rows] = (some["stat"] != 0) & (some["stat"] & LOW != self._stats[rows])
            self.errors += int((~some["answered"]).sum())
            self.checkpoints.update(some["checkpoint"].tolist())
            for content, place in some[some["content"] != 0][["content", "place"]].tolist():
                self.answers.put(content, place)

    def rows(self, wanted: Mask) -> Iterator[Row]:
        """Those ``wanted``. Raises InvalidRequest where the source is no longer what it was."""
        left = int(wanted.sum())
        try:
            for row in self._source.rows(wanted) if left else ():
                if row.asked != self.asked[row.number]:
                    break
                yield row
                left -= 1
        except IndexError:  # there are more than there were
            left = -1
        if left:
            raise InvalidRequest(f"{self._source.path} changed while it was read", "run the same command again")

    def _refuse(self, journal: Journal, wrong: np.ndarray, why: str) -> None:
        if len(wrong):
            name = journal.at(int(wrong["place"][0]))["id"]
            raise InvalidRequest(
                f"{journal.path} has a result of row {name!r:.80}, {why}", "give another -o, or remove the file"
            )


class Answers:
    """Where the answer to a question stands in the journal, by half of the digest of its contents; for ``rows`` at
    most. Who finds a place compares the whole digest of the line there.

    A table of what numbers alone take: Python's own takes 100 bytes for each.
    """

    def __init__(self, rows: int) -> None:
        self._size = 2 * rows
        self._digests, self._ends = array("Q", bytes(8 * self._size)), array("q", bytes(8 * self._size))
        """The latter: places and one; 0 where a slot is free."""

    def put(self, content: int, place: int) -> None:
        slot = self._slot(content)
        self._digests[slot], self._ends[slot] = content, place + 1

    def get(self, content: int) -> int | None:
        """Where the line begins that may have this content."""
        end = self._ends[self._slot(content)]
        return end - 1 if end else None

    def _slot(self, content: int) -> int:
        slot = content % self._size
        while self._ends[slot] and self._digests[slot] != content:
            slot = (slot + 1) % self._size
        return slot


def half(content: str) -> int:
    """What :class:`Answers` knows of a digest in hexadecimal."""
    return int(content[:16], 16)


FILES = 8  # threads that read pictures
AHEAD = 64  # rows whose pictures are compared at a time


def contents(row: Row) -> tuple[list[bytes], str]:
    """A row's pictures as encoded bytes, and the digest of all that its answer depends on. Raises InvalidRequest."""
    if row.error is not None:
        raise row.error
    pictures = encode_images(row.images)
    asked = without_priority(row.options)
    question = row.question if row.messages is None else row.messages
    state = blake2b(repr((question, asked, [len(picture) for picture in pictures])).encode(), digest_size=16)
    for picture in pictures:
        state.update(picture)
    return pictures, state.hexdigest()


def changed_rows(index: ResumeIndex, lines: Journal) -> list[int]:
    """Where the journal's lines begin whose rows have other pictures now.

    Only files whose stat differs are read; where their bytes are the same, the journal says the new one from then on.
    A picture that is gone is no other picture.
    """

    def is_other(row: Row) -> bool:
        place = int(index.places[row.number])
        line = lines.at(place)
        if not row.stat or int(line["stat"], 16) == row.stat:
            return False
        try:
            same = contents(row)[1] == line.get("content")
        except InvalidRequest:  # it is a picture no more
            return True
        if same:
            lines.restat(place, row.stat)
        return not same

    changed: list[int] = []
    rows = index.rows(index.touched)
    with ThreadPoolExecutor(FILES, "tessera-pictures") as pool:
        while some := list(islice(rows, AHEAD)):
            changed += [int(index.places[row.number]) for row, other in zip(some, pool.map(is_other, some)) if other]
    return changed
