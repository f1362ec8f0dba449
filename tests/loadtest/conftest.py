"""What tests of the programs share: their figures, and a server that does nothing in place of the real one."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
from serving import Running, Setup
from standin_server import standin

Figures = dict[str, dict[str, Any]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[[], Figures]:
    """The figures that were printed since it was asked last, by name."""
    return lambda: {line["metric"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch, printed: Callable[[], Figures]) -> Callable[..., Figures]:
    """(program, arguments) -> its figures, by name."""

    def run(program: Any, *arguments: str) -> Figures:
        monkeypatch.setattr("sys.argv", [program.__name__.rpartition(".")[2], *arguments])
        assert program.main() == 0
        return printed()

    return run


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Setup]]:
    """Makes a program start stand-ins; (program) -> what it asked for, as it asks."""

    def replace(program: Any) -> list[Setup]:
        started: list[Setup] = []

        @contextmanager
        def serve(setup: Setup) -> Any:
            started.append(setup)
            with standin() as address:
                yield Running([address], [], [], "", 0.0)

        monkeypatch.setattr(program, "serve", serve)
        return started

    return replace
