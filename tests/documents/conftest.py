"""Runs of `tessera parse` before a reader of documents."""

from pathlib import Path
from typing import Any

import pytest
from clients.fake_transport import FakeTransport

from tessera_command.cli import main
from tessera_documents import vlm_client


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command before a reader, into the folder ``out``; the exit code. ``layout``: what is at layout:1."""

    def run(reader: FakeTransport, *arguments: Any, layout: FakeTransport | None = None) -> int:
        readers = {"layout:1": layout}
        monkeypatch.setattr(vlm_client, "open_transport", lambda url, models: readers.get(url) or reader)
        small = () if "--dpi" in arguments else ("--dpi", "50")  # which is soon rendered
        patience = () if "--patience" in arguments else ("--patience", "1")
        return main(["parse", "-o", str(tmp_path / "out"), *small, *patience, *map(str, arguments)])

    return run
