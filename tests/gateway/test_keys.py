"""Who may ask, and how often."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import pytest
from gateway_doubles import ASKED, Asked, gateway

from tessera_gateway.keys import Key, Rates, read_keys
from tessera_gateway.metrics import Counters

ASK: dict[str, Any] = {"json": ASKED}


@pytest.fixture
def guarded(tmp_path: Path) -> Asked:
    file = tmp_path / "keys"
    file.write_text("first-key\n# ours\n\n  second-key \n", encoding="utf-8-sig")  # as editors on Windows write it
    return gateway(keys=file)


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
    for path in ("/health", "/", "/page/main.js"):  # a browser cannot send a key with the page itself
        assert guarded("GET", path).status_code == 200, path
    assert guarded.app.state.counters.total('requests_total{status="401"}') == 7
    guarded.app.state.metrics_urls = ["http://127.0.0.1:9/metrics"]
    known = {"Authorization": "Bearer first-key"}
    assert [each["up"] for each in guarded("GET", "/tessera/status", headers=known).json()["servers"]] == [False]
    empty = guarded("POST", "/tessera/tiles", headers=known)
    assert empty.status_code == 400 and "zero bytes" in empty.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# none\n", "keys holds no key"),
        ("good\nk rate=0", "keys, line 2: rate must be a number above 0"),
        ("good\nk share=nan", "keys, line 2: share must be a number above 0"),
        ("good\nk name=a,b", "keys, line 2: name has 1 to 64 of"),
        ("good\nk rate=1 rate=2", "keys, line 2: .*each once"),
        ("good\nk limit=1", "keys, line 2: .*may stand name=, rate= and share="),
        ("good\ngood", "keys, line 2: another line has this key"),
        ("good\nk name=key1", "keys, line 2: another line has this key or its name, key1"),
    ],
)
def test_a_line_that_is_not_understood_is_refused_by_its_number(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError, match=words) as refusal:
        read_keys(tmp_path / "keys")
    assert "good" not in str(refusal.value)


def test_keys_have_names_rates_and_shares(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\none\n\n  two  \nthree name=t rate=6 share=0.5\n")
    assert read_keys(tmp_path / "keys") == [Key(b"one", "key1"), Key(b"two", "key2"), Key(b"three", "t", 6.0, 0.5)]


def test_a_key_that_asks_too_much_is_told_when_to_ask_again(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret name=ann rate=1\n")
    door = gateway(keys=tmp_path / "keys")
    headers = {"Authorization": "Bearer secret"}
    assert door("POST", "/v1/chat/completions", headers=headers, **ASK).status_code == 200
    refusal = door("POST", "/v1/chat/completions", headers=headers, **ASK)
    assert refusal.status_code == 429 and 50 < int(refusal.headers["retry-after"]) <= 60
    assert refusal.json()["error"]["message"] == "the key ann may ask 1 requests a minute"
    assert door("GET", "/v1/models", headers=headers).status_code == 200
    assert "secret" not in refusal.text and len(door.fake.requests) == 1


def test_a_rate_is_held_over_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("tessera_gateway.keys.time.monotonic", lambda: now)
    counters = [Counters(tmp_path / "counters", 2, ["k"])]
    counters.append(copy(counters[0]))
    counters[1]._own = counters[0]._values[len(counters[0]._names) :]
    key = Key(b"s", "k", rate=30)  # five at once
    one, other = (Rates(each, [key]) for each in counters)
    assert [one.wait_s(key) for _ in range(3)] == [0, 0, 0]
    assert [other.wait_s(key) for _ in range(3)] == [0, 0, pytest.approx(2.0)]
    assert one.wait_s(key) == pytest.approx(2.0) and counters[0].total('key_requests_total{key="k"}') == 5
    now += 2.0
    assert one.wait_s(key) == 0 and one.wait_s(key) == pytest.approx(2.0)
    free = Key(b"f", "k")
    assert [one.wait_s(free) for _ in range(99)] == [0] * 99
