"""This user's files that can be made again: where they are kept, and how they are written."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from glob import escape
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

_UNUSED_S = 7 * 24 * 3600


def cache_folder() -> Path:
    """TESSERA_CACHE, else $XDG_CACHE_HOME/tessera or ~/.cache/tessera; it need not exist."""
    if own := os.environ.get("TESSERA_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tessera")


def source_digest(*folders: Path) -> str:
    """Sixteen digits that change with the text of our code in these folders, and below them."""
    digest = blake2b(digest_size=8)
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Makes ``path`` of the draft that ``write`` fills: no reader sees half of it, even if others write it meanwhile.

    Drafts of writers that were killed long ago go. Raises OSError where the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_unused(path.parent.glob(f"{escape(path.name)}.{'[0-9a-f]' * 32}.draft"))
    draft = path.with_name(f"{path.name}.{uuid4().hex}.draft")
    try:
        write(draft)
        with open(draft, "rb+") as written:  # the name must not reach the disk before the content
            os.fsync(written.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def is_kept(path: Path) -> bool:
    """Whether the file is there; it then counts as used now, and stays."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:  # owned by another user
        return path.is_file()
    return True


def remove_unused(paths: Iterable[Path]) -> None:
    """Removes those files that nobody has used for a week: another process may be about to read the others."""
    for path in paths:
        with suppress(OSError):  # somebody else was faster, or it is not ours
            if path.stat().st_mtime < time.time() - _UNUSED_S:
                path.unlink()
