"""Metrics on the server's own page, walled off from a hazard of this server.

Two metric calls at once from one process end the whole server, as does a single invalid one: a name that is none, or
buckets that do not rise. So every call goes through here, under the one lock of this process: SPEAKING.

This package's log lines in the server's own log.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tessera.tritonserver import backend
from tessera.tritonserver.failures import SPEAKING, log_exception

RENEW_SECONDS = 0.25
_FOR_GOOD: list[Any] = []  # a family leaves the page with its last reference


class _Family:
    """A metric family and its members by labels.

    ``options``: of a histogram its ``buckets``, upper bounds in rising order; tritonserver wants at least one.
    """

    kind: str

    def __init__(self, name: str, description: str, **options: Any) -> None:
        self._options = options
        self._members: dict[tuple[tuple[str, str], ...], Any] = {}
        self._values: dict[Any, float] = {}
        with SPEAKING:
            made = backend().MetricFamily
            self._family = made(name=name, description=description, kind=getattr(made, self.kind))

    def _member(self, labels: Mapping[str, str]) -> Any:
        """The member with these labels; call it under the lock."""
        key = tuple(sorted(labels.items()))
        if key not in self._members:
            self._members[key] = self._family.Metric(labels=dict(key), **self._options)
        return self._members[key]


class Counter(_Family):
    """A number that only grows; its name ends in ``_total``."""

    kind = "COUNTER"

    def raise_to(self, value: float, **labels: str) -> None:
        """Brings the counter to `value`; a smaller value than before is left alone."""
        with SPEAKING:
            member = self._member(labels)
            step = value - self._values.get(member, 0.0)
            if step > 0:
                member.increment(step)
                self._values[member] = value


class Gauge(_Family):
    """A number that goes up and down."""

    kind = "GAUGE"

    def set(self, value: float, **labels: str) -> None:
        with SPEAKING:
            self._member(labels).set(float(value))


class Histogram(_Family):
    """Observations counted in buckets."""

    kind = "HISTOGRAM"

    def observe(self, value: float, **labels: str) -> None:
        with SPEAKING:
            self._member(labels).observe(float(value))


class Renewed:
    """Has a page renewed four times a second, by a thread of its own that close() ends: each value is a question to the
    server, for which nobody who works should wait."""

    def __init__(self, renew: Callable[[], None]) -> None:
        self._renew = renew
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._renew()
            except Exception as error:  # what the page lacks now it may have the next time
                log_exception("metrics", error)
            if self._stop.wait(RENEW_SECONDS):
                return


def show_weights(stage: str, words: str, size: int) -> None:
    """Says once what a stage serves: the kind of its weights, and how many bytes of them."""
    gauge = Gauge("tessera_weight_bytes", "Bytes of a stage's weights on its device, and their kind")
    gauge.set(size, stage=stage, weights=words)
    _FOR_GOOD.append(gauge)


class ServerLog(logging.Handler):
    """Hands records to the Python backend's logger, by level."""

    def emit(self, record: logging.LogRecord) -> None:
        write = {"CRITICAL": "log_error", "ERROR": "log_error", "WARNING": "log_warn"}.get(record.levelname, "log_info")
        with SPEAKING:
            getattr(backend().Logger, write)(self.format(record))


def write_to_server_log(stage: str) -> None:
    """From now on everything that ``tessera`` logs, from INFO on, appears in the server's log as the stage's."""
    handler = ServerLog()
    handler.setFormatter(logging.Formatter(f"{stage}: %(message)s"))
    logger = logging.getLogger("tessera")
    logger.setLevel(logging.INFO)
    logger.handlers = [handler]
    logger.propagate = False
