"""Keeps two runs of a job from writing the same results."""

from __future__ import annotations

from pathlib import Path

from tessera_wire.errors import InvalidRequest


def lock(file: int, path: Path) -> None:
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
