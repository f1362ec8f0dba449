"""Which rows there are, and which of them are over: known before the first is asked. :class:`ResumeIndex`.

What a row's answer depends on, and the rows for which that is no longer what it was.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import compress, islice

import numpy as np

from tessera_client.pictures import encode_images
from tessera_jobs.journal import Journal
from tessera_jobs.rows import Id, Mask, Row, Source, without_priority
from tessera_wire.errors import InvalidRequest

LINES = 1 << 12  # that are matched at a time
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
        while some := list(islice(lines, LINES)):
            begins, asked, contents, answered, stats, checkpoints, named = zip(*some)
            places, digests = np.array(begins, np.int64), _numbers(asked)
            rows = order[np.searchsorted(self.asked, digests, sorter=order).clip(max=len(order) - 1)]
            known = self.asked[rows] == digests
            if not known.all():
                why = "which this job does not ask, or asks otherwise"
                self._refuse(journal, places, ~known & np.array(named), why)
                self.mended += places[~known].tolist()
            before = self.places[rows] >= 0
            self.places[rows[known]] = places[known]
            self._refuse(journal, places, known & (before | (self.places[rows] != places)), "twice")
            found = _numbers(stats)
            self.touched[rows] = known & (found != 0) & (found.astype(np.uint32) != self._stats[rows])
            self.errors += int((known & ~np.array(answered)).sum())
            self.checkpoints.update(checkpoints if known.all() else compress(checkpoints, known))
            shared = _numbers(contents)
            self.answers.put_all(shared[shared != 0], places[shared != 0])

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

    def _refuse(self, journal: Journal, places: np.ndarray, wrong: np.ndarray, why: str) -> None:
        if wrong.any():
            name = journal.at(int(places[wrong.argmax()]))["id"]
            raise InvalidRequest(
                f"{journal.path} has a result of row {name!r:.80}, {why}", "give another -o, or remove the file"
            )


def _numbers(digests: Sequence[bytes]) -> np.ndarray:
    """uint64 of 16 hexadecimal digits each."""
    return np.frombuffer(bytes.fromhex(b"".join(digests).decode()), ">u8").astype(np.uint64)


class Answers:
    """Where the answer to a question stands in the journal, by the digest of its contents; for ``rows`` at most.

    Half of a digest is kept: who finds a place compares the whole one of the line there.
    """

    def __init__(self, rows: int) -> None:
        size = 1 << (2 * rows - 1).bit_length()
        self._mask = size - 1
        self._digests = np.zeros(size, np.uint64)
        self._places = np.full(size, -1, np.int64)

    def put(self, content: str, place: int) -> None:
        self.put_all(np.array([int(content[:16], 16)], np.uint64), np.array([place]))

    def put_all(self, digests: np.ndarray, places: np.ndarray) -> None:
        """uint64 and int64 [answers]: the first half of each one's digest, and its place."""
        slots = (digests & np.uint64(self._mask)).astype(np.int64)
        while len(slots):
            free = self._places[slots] < 0
            # Where several want a slot, one of them has it in both.
            self._digests[slots[free]] = digests[free]
            self._places[slots[free]] = places[free]
            left = self._digests[slots] != digests
            digests, places, slots = digests[left], places[left], (slots[left] + 1) & self._mask

    def get(self, content: str) -> int | None:
        """Where the line begins that may have this content."""
        place = int(self._places[self._slot(int(content[:16], 16))])
        return None if place < 0 else place

    def _slot(self, digest: int) -> int:
        slot = digest & self._mask
        while self._places[slot] >= 0 and self._digests[slot] != digest:
            slot = (slot + 1) & self._mask
        return slot


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
