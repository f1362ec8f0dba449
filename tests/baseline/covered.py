"""Which production lines each quick test executes, and how long it takes: a pytest plugin.

    COVERED=times.jsonl PYTHONPATH=tests/baseline coverage run --rcfile=... -m pytest -p covered ...

Each test becomes a context `basename::function` of coverage's data, its fixtures included. A test that takes longer
than SLOW_S is stopped and written as slow: mutants are judged by quick tests only.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import coverage
import pytest

SLOW_S = int(os.environ.get("SLOW_S", "5"))
OUT = os.environ["COVERED"]


def _stop(signum: int, frame: object) -> None:
    pytest.fail("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [i for i in items if "server" not in i.fixturenames and not i.get_closest_marker("server")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    measured = coverage.Coverage.current()
    name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
    if measured:
        measured.switch_context(name)
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SLOW_S)
    begin = time.perf_counter()
    try:
        return (yield)
    finally:
        signal.alarm(0)
        item.stash[_SECONDS] = time.perf_counter() - begin
        with open(OUT, "a") as out:
            row = {
                "test": name,
                "seconds": round(item.stash[_SECONDS], 3),
                "outcome": item.stash.get(_OUTCOME, "error"),
            }
            out.write(json.dumps(row) + "\n")
        if measured:
            measured.switch_context("")


_SECONDS = pytest.StashKey[float]()
_OUTCOME = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[pytest.TestReport]:
    report = yield
    if report.outcome != "passed" or report.when == "call":
        item.stash[_OUTCOME] = report.outcome
    return report
