"""What a running server counted so far, from its metrics page."""

from __future__ import annotations

import urllib.request
from collections import Counter


def counted(url: str) -> Counter[str]:
    """Each metric's value, added up over its labels; 0 for one that is not there."""
    with urllib.request.urlopen(url, timeout=10) as page:
        lines = page.read().decode().splitlines()
    values: Counter[str] = Counter()
    for line in lines:
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name.partition("{")[0]] += float(value)  # type: ignore[assignment]
    return values
