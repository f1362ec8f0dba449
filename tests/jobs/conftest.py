"""Runs of `tessera batch` before a stand-in for a server."""

from pathlib import Path
from typing import Any

import pytest

from tessera_client import client
from tessera_command.cli import main


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command before a server, into ``out.jsonl`` where nothing else is said; the exit code."""

    def run(server: Any, *arguments: Any) -> int:
        monkeypatch.setattr(client, "open_transport", lambda url, models: server)
        output = () if "-o" in arguments else ("-o", tmp_path / "out.jsonl")
        return main(["batch", *map(str, (*arguments, *output))])

    return run
