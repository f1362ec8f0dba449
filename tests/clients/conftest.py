"""Clients that are opened in a test ask a stand-in."""

from collections.abc import Sequence
from typing import Any

import pytest
from fake_transport import FakeTransport

from tessera_client import client


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has every client ask ``fake``, or one that plays the script; returns it."""

    def install(*script: Sequence[Any], fake: Any = None) -> Any:
        fake = fake or FakeTransport(script)
        monkeypatch.setattr(client, "open_transport", lambda url, models: fake)
        return fake

    return install
