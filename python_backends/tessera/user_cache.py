"""This user's files that can be made again: where they are kept, and how they are written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4


def cache_folder() -> Path:
    """TESSERA_CACHE, else $XDG_CACHE_HOME/tessera or ~/.cache/tessera; it need not exist."""
    if own := os.environ.get("TESSERA_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tessera")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Makes ``path`` of the draft that ``write`` fills: nobody ever sees half of it, whoever else writes it meanwhile.

    Raises OSError where the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        write(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
