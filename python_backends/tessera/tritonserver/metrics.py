"""Metrics on the server's own page, walled off from two hazards of this server.

Two metric calls at once from one process, or a single invalid one, end the whole server. So every call goes through
here: checked first, and under the one lock of this process.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tessera.errors import ConfigError

_LOCK = threading.Lock()
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class _Family:
    """A metric family and its members by labels."""

    def __init__(self, kind: str, name: str, description: str, **options: Any) -> None:
        import triton_python_backend_utils as pb_utils

        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name for a metric")
        self.name = name
        self._options = options
        self._members: dict[tuple[tuple[str, str], ...], Any] = {}
        with _LOCK:
            self._family = pb_utils.MetricFamily(
                name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind)
            )

    def _member(self, labels: Mapping[str, str]) -> Any:
        """The member with these labels; call it under the lock."""
        key = tuple(sorted(labels.items()))
        if key not in self._members:
            wrong = [name for name in labels if not _NAME.fullmatch(name)]
            if wrong:
                raise ConfigError(f"{self.name}: {wrong[0]!r} is no name for a label")
            self._members[key] = self._family.Metric(labels=dict(key), **self._options)
        return self._members[key]


class Counter(_Family):
    """A number that only grows; its name ends in ``_total``."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__("COUNTER", name, description)
        self._values: dict[tuple[tuple[str, str], ...], float] = {}

    def raise_to(self, value: float, **labels: str) -> None:
        """Brings the counter to `value`; a smaller value than before is left alone."""
        with _LOCK:
            member = self._member(labels)
            key = tuple(sorted(labels.items()))
            step = value - self._values.get(key, 0.0)
            if step > 0:
                member.increment(step)
                self._values[key] = value


class Gauge(_Family):
    """A number that goes up and down."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__("GAUGE", name, description)

    def set(self, value: float, **labels: str) -> None:
        with _LOCK:
            self._member(labels).set(float(value))


class Histogram(_Family):
    """Observations counted in buckets.

    Args:
        buckets: upper bounds in rising order; tritonserver wants at least one.
    """

    def __init__(self, name: str, description: str, buckets: Sequence[float]) -> None:
        if not buckets or list(buckets) != sorted(set(buckets)):
            raise ConfigError(f"{name}: buckets must rise and not be empty, got {list(buckets)}")
        super().__init__("HISTOGRAM", name, description, buckets=[float(bound) for bound in buckets])

    def observe(self, value: float, **labels: str) -> None:
        with _LOCK:
            self._member(labels).observe(float(value))
