"""The SQLite file of a batch folder: :class:`Database`.

Which of several processes asks the lines of a batch folder: the one that holds its :class:`FolderLock`.
"""

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

FULL = "database or disk is full"  # SQLite's words
VERSION = 1
KEPT_FREE = 64 << 20  # bytes of the disk that uploads leave, for the results of what has been accepted
BUSY_S = 60.0  # that another process may write, before it is an error
SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS files (
    key INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given twice: lines of a file that is gone may be there for a while
    id TEXT NOT NULL UNIQUE,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,             -- batch: uploaded; batch_output: results
    state TEXT NOT NULL,               -- arriving, whole, gone (deleted, but for its lines)
    bytes INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL,
    touched_at INTEGER NOT NULL        -- when more of an upload came
);
CREATE TABLE IF NOT EXISTS lines (
    file INTEGER NOT NULL,
    number INTEGER NOT NULL,           -- from 1; of a result that of the line which was asked
    line BLOB NOT NULL,                -- with its end
    PRIMARY KEY (file, number)
);
CREATE TABLE IF NOT EXISTS batches (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    endpoint TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    metadata TEXT,                     -- JSON
    status TEXT NOT NULL,              -- OpenAI's words
    failure TEXT,                      -- JSON: why the whole batch failed
    input INTEGER NOT NULL, output INTEGER NOT NULL, errors INTEGER NOT NULL,  -- keys of files
    input_file_id TEXT NOT NULL, output_file_id TEXT, error_file_id TEXT,
    checked INTEGER NOT NULL DEFAULT 0,  -- number of the last line that has a row in requests
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
    in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER, expired_at INTEGER,
    cancelling_at INTEGER, cancelled_at INTEGER
);
CREATE TABLE IF NOT EXISTS requests (
    batch INTEGER NOT NULL,
    number INTEGER NOT NULL,           -- of the input's line
    custom_id TEXT,                    -- null where the line has none of its own
    over INTEGER NOT NULL,             -- whether its result is written
    PRIMARY KEY (batch, number),
    UNIQUE (batch, custom_id)
) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
COMMIT;
"""


def is_full(error: sqlite3.Error) -> bool:
    """Whether it is of the kind that ends when there is room again."""
    return str(error) == FULL


class Database:
    """The file in ``folder``, both made if they are not there; several processes may have it open.

    What has been committed outlives a kill of the process, and of the machine once SQLite has brought it to the disk.
    Raises OSError where there can be none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "batches.sqlite"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        try:
            self._connection = sqlite3.connect(path, BUSY_S, isolation_level=None, check_same_thread=False)
            self._connection.row_factory = sqlite3.Row
            found = self.all("PRAGMA user_version")[0][0]
            if found not in (0, VERSION):
                raise OSError(f"{path} is of version {found}; this gateway knows version {VERSION}")
            if not found:  # before there is a page; what is removed is then free on the disk too
                self._connection.execute("PRAGMA auto_vacuum = FULL")
            for setting in ("journal_mode = WAL", "synchronous = NORMAL", f"journal_size_limit = {64 << 20}"):
                self._connection.execute(f"PRAGMA {setting}")
            if not found:
                self._connection.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise OSError(f"{path} cannot be used: {error}") from error
        self._thread = ThreadPoolExecutor(1, "tessera-batches")

    async def call(self, work: Callable[..., T], *arguments: object) -> T:
        """What ``work`` returns or raises, done in the thread that this database has. Raises sqlite3.Error."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def all(self, query: str, *values: object) -> list[sqlite3.Row]:
        return self._connection.execute(query, values).fetchall()

    def one(self, query: str, *values: object) -> sqlite3.Row | None:
        return self._connection.execute(query, values).fetchone()

    def each(self, query: str, *values: object) -> Iterator[sqlite3.Row]:
        """Rows as they are read; the reading ends with the iterator."""
        cursor = self._connection.execute(query, values)
        try:
            yield from cursor
        finally:
            cursor.close()

    def change(self, query: str, *values: object) -> int:
        """How many rows it changed."""
        return self._connection.execute(query, values).rowcount

    def require_room(self, size: int) -> None:
        """Raises sqlite3.OperationalError where an upload of that size would leave the results too little room."""
        if not self.has_room(size - self._pragma("freelist_count") * self._pragma("page_size")):
            raise sqlite3.OperationalError(FULL)

    def has_room(self, size: int = 0) -> bool:
        """Whether the disk keeps enough free with that many bytes more; for any thread."""
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize >= size + KEPT_FREE

    def _pragma(self, name: str) -> int:
        return int(self.all(f"PRAGMA {name}")[0][0])

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of what is done within it, or nothing."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite ends some by itself: where the disk is full
                self._connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._thread.shutdown()
        self._connection.close()


class FolderLock:
    """The lock of ``folder``, not taken yet; it ends when it is closed, and with the process.

    Raises OSError, which says what to do, where there can be none.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError as error:
            raise OSError(
                f"{self._path} cannot be opened: {error.strerror}; without it no batch is asked: make it a file that "
                "this user may write, or give another --batch-folder"
            ) from error

    def take(self) -> bool:
        """Whether this process has the lock now, or had it before. Raises OSError where none can be had at all."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise OSError(
                f"{self._path} cannot be locked: {error.strerror}; without it no batch is asked: give a --batch-folder "
                "on a local disk"
            ) from error
        return True

    def close(self) -> None:
        os.close(self._file)
