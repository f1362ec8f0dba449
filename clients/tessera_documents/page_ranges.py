"""Which pages of each document are read: ``1-3,7,10-``."""

from __future__ import annotations

import re

from tessera_wire.errors import InvalidRequest

RANGE = re.compile(r"\s*(\d+)\s*(?:(-)\s*(\d*)\s*)?")


class PageRanges:
    """``text``: numbers from 1 and ranges with commas between, an open one to the last page. Raises InvalidRequest."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._ranges = [self._range(part) for part in text.split(",")]

    def _range(self, part: str) -> tuple[int, int | None]:
        found = RANGE.fullmatch(part)
        first = int(found[1]) if found else 0
        last = first if found and not found[2] else int(found[3]) if found and found[3] else None
        if not found or first < 1 or (last is not None and last < first):
            raise InvalidRequest(f"--pages {self._text!r}: {part!r} is no page or range of pages", "as in 1-3,7,10-")
        return first, last

    def of(self, pages: int) -> list[int]:
        """Those of a document of ``count`` pages, counted from 0."""
        ends = [(first, pages if last is None else min(last, pages)) for first, last in self._ranges]
        return sorted({page - 1 for first, last in ends for page in range(first, last + 1)})
