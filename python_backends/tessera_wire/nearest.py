"""What somebody may have meant who wrote a name that does not exist."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

MOST_NEIGHBOURS = 1000
"""Files of a folder that are looked through: among millions it would take seconds."""


def close(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """The end of a refusal: "; did you mean X?", or empty where nothing known is like it."""
    found = difflib.get_close_matches(name, list(known), 1, cutoff)
    return f"; did you mean {found[0]}?" if found else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a refusal: what may have been meant, else all there is."""
    names = list(known)
    return close(name, names) or f"; known are {', '.join(sorted(names))}"


def missing(path: str | Path) -> str:
    """The refusal of a path where nothing is: where it was looked for, and what there is that is called like it."""
    full = Path(path).absolute()
    try:
        with os.scandir(full.parent) as entries:
            hint = close(full.name, [entry.name for entry in islice(entries, MOST_NEIGHBOURS)], 0.7)
    except OSError:
        hint = f"; there is no folder {full.parent} either"
    where = "" if str(full) == str(path) else f" (looked for {full})"
    return f"there is no file or folder {path}{where}{hint}"
