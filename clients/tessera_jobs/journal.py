"""What is over: a line for each row, appended as it comes. :class:`Journal`.

A line is a JSON object, the same as the result of the row:

=================  =====================================================================================
id                 the row's
answer, error      text and null, or null and the reason why there is no answer
finish_reason      ``stop``, ``length``, ... (not with an error)
..._tokens         ``prompt``, ``image`` (a part of prompt) and ``completion`` (not with an error or same_as)
choices, logprobs  where they were asked for
cascade            ``margin`` and ``escalated``, where the tile policy is a cascade
fingerprint        of what answered (docs/determinism.md)
same_as            id of the row that asked the same about the same picture, and whose answer this is
asked, content     digests in hexadecimal: of the row as the source has it, and of question and pictures' bytes
stat               in hexadecimal what stands for the pictures' files as they were found (not where there are none)
checkpoint         in hexadecimal the beginning of the digest of the model that was asked
=================  =====================================================================================

A line that was cut by a kill is the last one and lacks its end; the next one takes its place. What has been written
outlives a kill of the process at once, and one of the machine after :meth:`Journal.sync`.

Keeps two runs of a job from writing the same results (:class:`Locked`), and puts whole files in the place of others
(:func:`replaced`).
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tessera_wire.errors import InvalidRequest

BEGIN = b'{"id": '
NAMELESS = b'{"id": null,'  # a row that could not be asked
DIGESTS = re.compile(
    rb'"asked": "([0-9a-f]{16})"(?:, "content": "([0-9a-f]{32})")?(?:, "stat": "([0-9a-f]{16})")?'
    rb'(?:, "checkpoint": "([0-9a-f]{16})")?}\n$'
)
STAT = b'", "stat": "'
LONGEST_DIGESTS = 160  # bytes


class Locked:
    """The file at ``path``, made where there is none and kept open, of which no other run has a lock meanwhile: for
    what is at ``results``.

    Raises OSError, and InvalidRequest where another run has it.
    """

    def __init__(self, path: Path, results: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(self._file, results)
        except BaseException:
            self.close()
            raise

    def check(self, what: Path) -> None:
        """Raises OSError where the file was removed or replaced meanwhile, and with it ``what``. In any thread."""
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._file)):
                return
            how = "replaced"
        except FileNotFoundError:
            how = "removed"
        raise OSError(f"{what} was {how} while this run was writing it")

    def close(self) -> None:
        """Lets other runs have it."""
        os.close(self._file)


class Journal(Locked):
    """The lines at ``path``. What is appended comes behind the last whole one that :meth:`lines` or :meth:`placed` has
    found there, or that :meth:`rewrite` has written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, path)
        self._end = 0
        self._torn = False
        """Whether what stands behind the end may be cut off."""

    def append(self, result: dict[str, Any]) -> int:
        """Writes a line; where it begins. Raises OSError, also where the file is not what this run has written."""
        size = self._check()
        if self._torn:
            os.ftruncate(self._file, self._end)
            self._torn = False
        elif size > self._end:
            raise OSError(f"{self.path} has grown to {size} bytes by another program while this run was writing it")
        begin, line = self._end, _line(result)
        while line:
            written = os.pwrite(self._file, line, self._end)
            self._end += written
            line = line[written:]
        return begin

    def at(self, place: int) -> dict[str, Any]:
        """The line that begins there."""
        return json.loads(self._line_at(place))

    def restat(self, place: int, stat: int) -> None:
        """Has the line that begins there say another ``stat``, of pictures that were found to be the same."""
        at = self._line_at(place).rfind(STAT)
        os.pwrite(self._file, b"%016x" % stat, place + at + len(STAT))

    def _line_at(self, place: int) -> bytes:
        size = 4096
        while b"\n" not in (data := os.pread(self._file, size, place)):
            if len(data) < size:
                self._check()
                raise OSError(f"{self.path} has no whole line at byte {place}")
            size *= 2
        return data[: data.index(b"\n")]

    def _check(self) -> int:
        """The file's size. Raises OSError where it was removed, replaced or cut meanwhile. In any thread."""
        end = self._end
        self.check(self.path)
        if (size := os.fstat(self._file).st_size) < end:
            raise OSError(f"{self.path} was cut to {size} bytes while this run was writing it")
        return size

    def lines(self) -> Iterator[tuple[int, int, int, int, bytes, bool, bool]]:
        """What is known of every line without reading all of it, as :data:`tessera_jobs.resume_index.LINE` has it.
        Raises InvalidRequest for one that is no result."""
        for place, line in self._lines():
            digests = DIGESTS.search(line, len(line) - LONGEST_DIGESTS) if line.startswith(BEGIN) else None
            if digests is None:
                raise self._strange(line, place)
            asked, content, stat, checkpoint = digests.groups()
            # Inside a text these quotes would have a backslash before them.
            answered = b'"error": null' in line
            shared = int(content[:16], 16) if content and answered and b'"same_as": ' not in line else 0
            about = int(asked, 16), shared, int(stat or b"0", 16), checkpoint or b""
            yield place, *about, answered, not line.startswith(NAMELESS)

    def placed(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Every line and where it begins. Raises InvalidRequest for one that is no result."""
        for place, line in self._lines():
            try:
                yield place, json.loads(line)
            except (ValueError, RecursionError):
                raise self._strange(line, place) from None

    def rewrite(self, results: Iterable[dict[str, Any]]) -> None:
        """Goes on with these results in the place of those that are there."""
        rewrite(self.path, results)
        other = Journal(self.path)
        os.close(self._file)
        self._file, self._end, self._torn = other._file, os.fstat(other._file).st_size, False

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        place = 0
        with open(self.path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield place, line
                    place += len(line)
                elif not line.startswith(BEGIN[: len(line)]) and line.strip(b"\0"):  # zeros: the machine went down
                    raise self._strange(line, place)
        self._end, self._torn = place, os.fstat(self._file).st_size > place

    def sync(self) -> None:
        """Returns when all is on the disk. Raises OSError as :meth:`append` does."""
        os.fsync(self._file)
        self._check()

    def _strange(self, line: bytes, place: int) -> InvalidRequest:
        words = f"{self.path} holds something else than results, at byte {place}: {line[:60]!r}"
        return InvalidRequest(words, "give another -o, or remove it")


def rewrite(path: Path, results: Iterable[dict[str, Any]]) -> None:
    """Puts these results in the place of the journal's; whatever ends this, one or the other is there whole."""
    with replaced(path) as file:
        for result in results:
            file.write(_line(result))


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which stands at ``path`` when it is whole: its reader finds that, or what was there before.
    Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    with open(part, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _line(result: dict[str, Any]) -> bytes:
    # A file's name need not be UTF-8; json reads half surrogate pairs as they are written here.
    return json.dumps(result, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _lock(file: int, path: Path) -> None:
    """Locks an open file, until it is closed, for what is at ``path``.

    Raises InvalidRequest where another run has it, OSError where this disk's files cannot be locked.
    """
    try:
        import fcntl
    except ImportError:  # there is none on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidRequest(f"another run is writing {path}", "wait for it, or give another -o") from None
    except OSError as error:
        raise OSError(
            f"{path} cannot be locked against other runs: {error.strerror}; give an -o on a disk whose files can be"
        ) from error
