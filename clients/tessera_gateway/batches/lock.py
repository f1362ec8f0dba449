"""Which of several processes asks the lines of a batch folder: the one that holds its :class:`FolderLock`."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType


class FolderLock:
    """The lock of ``folder``, not taken yet; it ends with the context and with the process.

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

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        os.close(self._file)
