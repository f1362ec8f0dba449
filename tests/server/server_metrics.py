"""Reading the server's metrics page in tests."""

from __future__ import annotations

import urllib.request


def read(url: str) -> dict[str, float]:
    """Every sample of the page: name with labels -> value."""
    with urllib.request.urlopen(url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def total(samples: dict[str, float], family: str) -> float:
    """The sum over all labels of one family."""
    return sum(value for name, value in samples.items() if name.split("{")[0] == family)
