"""The gateway's own counters, added up over its workers.

Every worker has a row of numbers in one file that all of them map into memory. It writes its own row alone, so nothing
needs a lock, and the worker that is asked for the page adds up all rows. A row belongs to the process that has the file
lock on its place: when a worker dies, its successor takes the row over, and the counters go on.
"""

import fcntl
import mmap
import os
import re
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

STATUSES = (200, 400, 401, 404, 405, 408, 413, 429, 431, 499, 500, 501, 503, 504, 0)
"""0 is any other."""
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Seconds of a completion, from its first byte to its last."""
BUCKETS = {float(bound): f'completion_seconds_bucket{{le="{bound}"}}' for bound in (*BOUNDS, "+Inf")}
TOKENS = ("prompt", "completion")
WAITING = "batch_writes_waiting"
GAUGES = ("requests_under_way", "connections", "body_bytes_held", WAITING)
"""What a worker that died takes along."""
NAMES = (
    *(f'requests_total{{status="{status or "other"}"}}' for status in STATUSES),
    *BUCKETS.values(),
    *("completion_seconds_sum", "completion_seconds_count"),
    *(f'tokens_total{{kind="{kind}"}}' for kind in TOKENS),
    "body_bytes_total",
    *GAUGES,
)
"""What stands in a row, by the names of the page less the prefix."""
ABOUT = {
    "key_requests_total": ("counter", "Requests (POST) that keys were let ask, by the key's name"),
    "requests_total": ("counter", "Requests answered, by HTTP status (499: the client went away)"),
    "completion_seconds": ("histogram", "Seconds from a completion's arrival to the end of its answer"),
    "tokens_total": ("counter", "Tokens of the completions, those of batches too"),
    "body_bytes_total": ("counter", "Bytes of the requests' bodies"),
    "requests_under_way": ("gauge", "Requests that are not answered yet"),
    "connections": ("gauge", "Connections of clients"),
    "body_bytes_held": ("gauge", "Bytes of the bodies of requests that are not answered yet"),
    WAITING: ("gauge", "What batches have to write and the disk has no room for"),
}
COMPLETIONS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
STATUS, USAGE, MODEL, TURN = "tessera.status", "tessera.usage", "tessera.model", "tessera.turn"
"""Keys of a request's scope: the status that counts, also where another was sent; a completion's tokens and model; what
gives its place at the servers back."""
PREFIX = "tessera_gateway_"


def of_key(name: str) -> str:
    """The counter of a key's requests."""
    return f'key_requests_total{{key="{name}"}}'


class Counters:
    """This worker's row, and the sum of all.

    Args:
        path: the workers' file, made if it is not there; None: one worker's row in its own memory.
        workers: how many rows it has.
        keys: names of the keys that requests may have.
    """

    def __init__(self, path: Path | None = None, workers: int = 1, keys: Iterable[str] = ()) -> None:
        self._names = (*NAMES, *map(of_key, keys))
        self._place = {name: number for number, name in enumerate(self._names)}
        size, row, file = struct.calcsize("d") * len(self._names) * workers, 0, -1
        if path is not None:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # never closed: the lock is this file's
            os.ftruncate(file, size)
            row = _claim(file, workers)
        self._values = memoryview(mmap.mmap(file, size)).cast("d")
        self._own = self._values[row * len(self._names) : (row + 1) * len(self._names)]
        for name in GAUGES:  # those of a worker that died are over
            self._own[self._place[name]] = 0.0

    def add(self, name: str, value: float = 1.0) -> None:
        self._own[self._place[name]] += value

    def ended(self, status: int) -> None:
        """Counts an answered request."""
        self.add(f'requests_total{{status="{status if status in STATUSES else "other"}"}}')

    def completed(self, seconds: float, usage: Mapping[str, int] | None) -> None:
        """Counts a completion's time, and its tokens where they are known."""
        for bound, bucket in BUCKETS.items():
            if seconds <= bound:
                self.add(bucket)
        self.add("completion_seconds_sum", seconds)
        self.add("completion_seconds_count")
        self.used(usage)

    def used(self, usage: Mapping[str, Any] | None) -> None:
        """Counts a completion's tokens where they are known."""
        for kind in TOKENS:
            self.add(f'tokens_total{{kind="{kind}"}}', usage[f"{kind}_tokens"] if usage else 0)

    def total(self, name: str) -> float:
        """A number, added up over all workers."""
        return sum(self._values[self._place[name] :: len(self._names)].tolist())

    def page(self) -> str:
        """Prometheus's text format."""
        lines: list[str] = []
        for family, (kind, words) in ABOUT.items():
            lines += [f"# HELP {PREFIX}{family} {words}", f"# TYPE {PREFIX}{family} {kind}"]
            known = [name for name in self._names if re.match(rf"{family}(_bucket|_sum|_count)?($|{{)", name)]
            lines += [f"{PREFIX}{name} {self.total(name):.16g}" for name in known]
        return "\n".join(lines) + "\n"


def _claim(file: int, rows: int) -> int:
    """The first row that is free. The lock ends with this process."""
    for row in range(rows):
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
            return row
    raise RuntimeError(f"more than {rows} workers")
