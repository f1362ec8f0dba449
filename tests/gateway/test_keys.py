"""Who may ask, how often, and who goes next where more is asked than the servers work at: keys take turns by shares."""

import asyncio
import json
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from clients.fake_transport import FakeTransport, Hang
from gateway_doubles import ASKED, Asked, gateway

from tessera_gateway.errors import ApiError
from tessera_gateway.keys import KEY, Key, Rates, Turns, read_keys
from tessera_gateway.metrics import TURN, Counters
from tessera_gateway.settings import Settings

pytestmark = pytest.mark.anyio

WAITING = 8
A, B, C = (Key(name.encode(), name) for name in "ABC")
ASK: dict[str, Any] = {"json": ASKED}


@pytest.fixture
def guarded(tmp_path: Path) -> Asked:
    file = tmp_path / "keys"
    file.write_text("first-key\n# ours\n\n  second-key \n", encoding="utf-8-sig")  # as editors on Windows write it
    return gateway(keys=file)


def test_a_completion_needs_one_of_the_keys(guarded: Asked) -> None:
    for header in ("Bearer third-key", "Bearer # ours", "Bearer ", "Basic first-key", "first-key", None):
        headers = {"Authorization": header} if header else {}
        response = guarded("POST", "/v1/chat/completions", headers=headers, **ASK)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer" and guarded.fake.requests == []
    for header in ("Bearer first-key", "bearer second-key"):
        assert guarded("POST", "/v1/chat/completions", headers={"Authorization": header}, **ASK).status_code == 200


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


def test_answers_of_one_key_may_be_drafts_of_its_others_alone(guarded: Asked) -> None:
    for header in ("Bearer first-key", "Bearer first-key", "Bearer second-key"):
        guarded("POST", "/v1/chat/completions", headers={"Authorization": header}, **ASK)
    one, same, other = (json.loads(request.sampling)["draft_pool"] for request, *_ in guarded.fake.requests)
    assert one == same != other and "first" not in one
    open_to_all = gateway()
    open_to_all("POST", "/v1/chat/completions", **ASK)
    assert "draft_pool" not in json.loads(open_to_all.fake.requests[0][0].sampling or "{}")


def test_each_worker_has_its_part() -> None:
    for workers, asked, places in ((1, None, 512), (1, 10, 10), (4, None, 160), (4, 10, 4), (8, 1, 1)):
        assert Settings(url="a:1,b:1", workers=workers, max_in_flight=asked).places == places


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


class Queue:
    """Requests before a worker's turns; ``went`` has the names of the keys, in the order in which they went."""

    def __init__(self, places: int, seconds: float = 60.0) -> None:
        self.now = 0.0
        self.turns, self.went = Turns(places, seconds, lambda: self.now), list[str]()
        self.inside: list[dict[str, Any]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, key: Key, count: int = 1, priority: int = 0, answers: int = 1) -> None:
        self.tasks += [asyncio.ensure_future(self._one(key, priority, answers)) for _ in range(count)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _one(self, key: Key, priority: int, answers: int) -> None:
        scope: dict[str, Any] = {KEY: key}
        await self.turns.take(scope, priority, answers)
        self.went.append(key.name)
        self.inside.append(scope)

    async def end(self, count: int = 1) -> None:
        for _ in range(count):
            self.inside.pop(0)[TURN]()
            for _ in range(3):
                await asyncio.sleep(0)


async def test_who_has_much_less_at_the_servers_passes_what_a_flood_has_there() -> None:
    turns, scopes = Turns(16, 60.0), [{KEY: key} for key in (A, A, A, A, B, B, B)]
    taken = [await turns.take(scope, 5, 1) for scope in scopes]
    assert taken == [5, 5, 5, 5, 4, 4, 5]  # the third is more than half of the flood's four
    assert await turns.take({KEY: C}, 7, 1) == 7  # nothing of that priority is there
    assert await turns.take({KEY: Key(b"D", "D", share=4.0)}, 5, 8) == 4
    for scope in scopes:
        scope[TURN]()
    assert await turns.take({KEY: A}, 5, 1) == 4 and await turns.take({KEY: A}, 5, 1) == 5


@pytest.mark.parametrize(("share", "most"), [(1.0, 64), (3.0, 96)])
async def test_a_flood_leaves_places_free_while_another_key_asks(
    monkeypatch: pytest.MonkeyPatch, share: float, most: int
) -> None:
    monkeypatch.setattr("tessera_gateway.keys.ASKS_FOR_S", 0.01)
    queue, flood = Queue(256), Key(b"flood", "flood", share=share)
    await queue.ask(B)
    await queue.ask(flood, 1000)
    assert queue.went.count("flood") == most
    for _ in range(20):
        await queue.ask(B)
        assert queue.went[-1] == "B"  # at once
    for _ in range(20):  # B's first and those of the flood, whose next go
        await queue.end()
    assert queue.turns._taken(flood) == most
    for scope in [each for each in queue.inside if each[KEY] is B]:
        queue.inside.remove(scope)
        scope[TURN]()
    await asyncio.sleep(0.03)
    assert queue.turns._taken(flood) == most  # B asked just now
    queue.now += 0.01
    await asyncio.wait_for(asyncio.shield(queue.tasks[256]), 30)  # without any other event
    assert queue.turns._taken(flood) == 256 and queue.turns._free == 0
    await queue.ask(B)
    await queue.end(256 - most)
    assert queue.went[-1] == "B" and queue.turns._taken(flood) == most
    for task in queue.tasks:
        task.cancel()
    await asyncio.gather(*queue.tasks, return_exceptions=True)


async def test_shares_and_priorities() -> None:
    big = Key(b"big", "big", share=3.0)
    queue = Queue(1)
    await queue.ask(C)
    await queue.ask(A, 8)
    await queue.ask(big, 12)
    await queue.ask(B, priority=-1)
    await queue.end(17)
    assert queue.went[:2] == ["C", "B"]
    assert queue.went[2:].count("big") == 12 and queue.went[2:].count("A") == 4
    await queue.end(5)
    assert queue.turns._free == 1 and not queue.turns._next and not queue.turns._waiting


async def test_places_come_back_after_any_end() -> None:
    queue = Queue(2)
    await queue.ask(A, 2)
    await queue.ask(B, 60)
    for task in queue.tasks[3:]:
        task.cancel()
    await asyncio.gather(*queue.tasks[3:], return_exceptions=True)
    assert len(queue.turns._waiting[B]) == 1
    queue.inside.pop(0)[TURN]()
    queue.tasks[2].cancel()  # its turn has come, and it does not know yet
    await asyncio.gather(queue.tasks[2], return_exceptions=True)
    assert queue.turns._free == 1 and queue.went == ["A", "A"]
    await queue.ask(C, answers=8)  # more than there are
    assert queue.went == ["A", "A"]
    await queue.end()
    assert queue.went == ["A", "A", "C"] and queue.turns._free == 0
    await queue.end()
    assert queue.turns._free == 2
    queue.now += 10.0
    await queue.ask(A, 2)
    await queue.ask(B, 2)
    queue.tasks[-2].cancel()  # and does not know yet when its turn would come
    queue.inside.pop(0)[TURN]()
    await asyncio.gather(queue.tasks[-2], return_exceptions=True)
    await queue.tasks[-1]
    assert queue.went[-3:] == ["A", "A", "B"] and queue.turns._free == 0


async def test_where_too_many_wait_the_greediest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera_gateway.keys.MOST_WAITING", WAITING)
    queue = Queue(1)
    await queue.ask(A, 1 + WAITING)
    await queue.ask(A)
    with pytest.raises(ApiError, match="too many requests wait") as refusal:
        await queue.tasks[-1]
    assert refusal.value.status == 429
    await queue.ask(B)
    await queue.end()
    assert queue.went[-1] == "B"
    with pytest.raises(ApiError):
        await queue.tasks[WAITING]  # the last of A's that waited
    await queue.end(WAITING)
    assert queue.went.count("B") == 1 and queue.went.count("A") == WAITING
    slow = Queue(1, seconds=0.01)
    await slow.ask(A, 2)
    with pytest.raises(ApiError, match="ran out before its turn"):
        await slow.tasks[1]
    assert not slow.turns._waiting


async def test_the_gateway_sends_no_more_than_the_servers_work_at(tmp_path: Path) -> None:
    """And gives places back, of clients that went away too."""
    (tmp_path / "keys").write_text("a name=ann\nb name=bob\n")
    door = Asked(FakeTransport([[Hang()]]), Settings(max_in_flight=1, keys=tmp_path / "keys", timeout_s=0.2))
    bearer = [{"Authorization": f"Bearer {key}"} for key in "ab"]
    asking = (door.send("POST", "/v1/chat/completions", json=ASKED, headers=headers) for headers in bearer)
    first, _ = await asyncio.gather(*asking)
    assert first.status_code == 504 and len(door.fake.requests) <= 2
    assert door.app.state.turns._free == 1
    page = (await door.send("GET", "/metrics", headers=bearer[0])).text
    assert 'tessera_gateway_key_requests_total{key="ann"} 1' in page
