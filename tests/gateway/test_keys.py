"""Who may ask."""

from __future__ import annotations

from pathlib import Path

import pytest
from gateway_doubles import Asked, gateway

from tessera_gateway.keys import read_keys

ASK = {"json": {"model": "vlm", "messages": [{"role": "user", "content": "hello"}]}}


@pytest.fixture
def guarded(tmp_path: Path) -> Asked:
    file = tmp_path / "keys"
    file.write_text("first-key\n# ours\n\n  second-key \n", encoding="utf-8-sig")  # as editors on Windows write it
    return gateway(keys=str(file))


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer first-key", 200),
        ("bearer second-key", 200),
        ("Bearer third-key", 401),
        ("Bearer # ours", 401),
        ("Bearer ", 401),
        ("Basic first-key", 401),
        ("first-key", 401),
        (None, 401),
    ],
)
def test_a_completion_needs_one_of_the_keys(guarded: Asked, header: str | None, status: int) -> None:
    headers = {"Authorization": header} if header else {}
    response = guarded("POST", "/v1/chat/completions", headers=headers, **ASK)
    assert response.status_code == status
    if status == 401:
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer" and guarded.fake.requests == []


def test_what_needs_a_key_and_what_does_not(guarded: Asked) -> None:
    for path in ("/v1/models", "/v1/batches", "/metrics", "/metrics/servers", "/tessera/status", "/v1/nothing"):
        assert guarded("GET", path).status_code == 401, path
    assert guarded("POST", "/tessera/tiles", content=b"jpeg").status_code == 401
    for path in ("/health", "/", "/page/main.js"):
        assert guarded("GET", path).status_code == 200, path
    assert guarded.app.state.counters.total('requests_total{status="401"}') == 7


def test_a_file_without_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none\n")
    with pytest.raises(ValueError, match="holds no key"):
        read_keys(tmp_path / "keys")
