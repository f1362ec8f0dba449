"""Rows whose server goes away under them: waited for, asked again, and the one that kills it is found."""

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from copy import copy
from typing import Any

import pytest
from clients.fake_transport import FakeTransport, final
from fakes.answering_server import PROBE
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tessera_client import Answer, AsyncClient, ConnectionFailed, InvalidRequest, Retry, ServerError, Unavailable
from tessera_client.messages import Request
from tessera_client.transports import Deliver, Sent, pool
from tessera_client.transports.pool import PooledTransport
from tessera_jobs import asker
from tessera_jobs.asker import ALONE, SUSPECT, Asker, ServersUnavailable
from tessera_wire.errors import TesseraClientError


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asker, "PAUSE_S", 0)
    monkeypatch.setattr(asker, "BUSY", Retry(first_delay=0))


class Falling(FakeTransport):
    """A server that goes away, for two looks, when it is asked what is in ``deadly``, N times; what else is under
    way then fails too. Other answers come a moment later, by a thread of their own."""

    def __init__(self, error: TesseraClientError, **deadly: int) -> None:
        super().__init__()
        self.error, self.deadly, self.away = error, Counter(deadly), 0
        self.under_way: dict[str, tuple[str, Deliver]] = {}
        self.beside: list[int] = []
        """How many rows were under way each time that it went."""
        self.times: Counter[str] = Counter()

    def send(self, request: Request, request_id: str, timeout: float | None, deliver: Deliver) -> Sent:
        text = request.text or ""
        with self._lock:
            self.times[text] += 1
            if self.away:
                self.away -= text == PROBE
                deliver(copy(self.error))  # one each: who delivers it notes the server in it
            elif self.deadly[text]:
                self.deadly[text] -= 1
                self.away = 2
                self.beside.append(sum(text != PROBE for text, _ in self.under_way.values()))
                self.under_way[request_id] = text, deliver
                for _, broken in self.under_way.values():
                    broken(copy(self.error))
                self.under_way.clear()
            else:
                self.under_way[request_id] = text, deliver
                threading.Timer(0.002, self.answer, (request_id, text)).start()
        return Sent(lambda: None, lambda: None)

    def answer(self, request_id: str, text: str) -> None:
        with self._lock:
            _, deliver = self.under_way.pop(request_id, (text, None))
        if deliver is not None:
            deliver(final(f"answer to {text}"))
            deliver(None)


def ask(transport: Any, questions: Sequence[str], patience: float = 60.0, at_a_time: int = 4) -> list[Any]:
    """The answers' texts or the errors, asked a few at a time."""

    async def all_of_them() -> list[Any]:
        async with AsyncClient(transport=transport, retry=Retry(attempts=1)) as client:
            one, slots = Asker(client, patience, one_model=True), asyncio.Semaphore(at_a_time)

            async def within(question: str) -> Any:
                async with slots:
                    return await text_or_error(one.ask(lambda client: client.ask(None, question)))

            return await asyncio.gather(*map(within, questions))

    return asyncio.run(all_of_them())


async def text_or_error(asking: Coroutine[Any, Any, Answer]) -> Any:
    try:
        return (await asking).text
    except (TesseraClientError, ServersUnavailable) as error:
        return error


QUESTIONS = [f"q{number}" for number in range(20)]
GONE = ConnectionFailed("the line broke")


@pytest.mark.parametrize(
    "error", [GONE, Unavailable("Stub process is not healthy"), InvalidRequest("odd"), ServerError("")]
)
def test_a_server_that_comes_back_costs_no_answer(error: TesseraClientError) -> None:
    # Whatever it says while it goes: a refusal counts only where the server is in order.
    assert ask(Falling(error, q3=1, q11=1), QUESTIONS) == [f"answer to {question}" for question in QUESTIONS]


@pytest.mark.parametrize("looks", [[None, GONE, None], [GONE, None, None]])
def test_a_row_refused_beside_a_look_at_its_server_is_not_judged_by_it(looks: list[Exception | None]) -> None:
    """A server goes after that look began, or is back before the row's own: the refusal is not the row's either way."""

    class Late(FakeTransport):
        """Refuses "odd" at once, and "late", once, when it is looked at the first time that says nothing of it."""

        def send(self, request: Request, request_id: str, timeout: float | None, deliver: Deliver) -> Sent:
            if request.text == "late" and late is None:
                held.append(deliver)
                return Sent(lambda: None, lambda: None)
            return super().send(request, request_id, timeout, deliver)

        def answer_to(self, request: Request) -> Sequence[Any]:
            nonlocal late
            if request.text == "odd":
                return [InvalidRequest("odd")]
            if request.text == PROBE and looks:
                error = looks.pop(0)
                if late is None and error is None:
                    late = held.pop()
                    late(InvalidRequest("late"))
                return [error] if error else [final()]
            return super().answer_to(request)

    held: list[Deliver] = []
    late: Deliver | None = None
    odd, answer = ask(Late(), ["odd", "late"])
    assert answer == "answer to late" and str(odd) == "odd"


@pytest.mark.parametrize("count", [1, 3])
def test_a_row_that_kills_servers_is_told_from_those_beside_it(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "REST_SECONDS", 0.01)
    servers = [Falling(GONE, q5=99) for _ in range(count)]
    answers = ask(PooledTransport({f"host{number}:1": each for number, each in enumerate(servers)}), QUESTIONS)
    poison = answers[5]
    assert isinstance(poison, ServerError) and "a server went away each of 5 times" in poison.message
    # One that is asked again before its server is known to be back is not laid to the row's account.
    assert sum(len(each.beside) for each in servers) >= SUSPECT + ALONE
    assert count > 1 or servers[0].beside[-ALONE:] == [0] * ALONE
    answers[5] = "answer to q5"
    assert answers == [f"answer to {question}" for question in QUESTIONS]


def test_a_row_that_only_was_there_each_time_is_answered_alone() -> None:
    assert ask(Falling(GONE, q5=SUSPECT), QUESTIONS)[5] == "answer to q5"


def test_patience_ends() -> None:
    (error,) = ask(FakeTransport([[GONE]] * 9), ["a"], patience=0)
    assert isinstance(error, ServersUnavailable) and error.error is GONE
    busy = FakeTransport([[Unavailable("busy")], [final()]])
    assert isinstance(ask(busy, ["a"], patience=0)[0], ServersUnavailable)


def test_servers_that_are_away_already_are_not_laid_to_a_rows_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "REST_SECONDS", 0.01)

    class Dead(FakeTransport):
        def answer_to(self, request: Request) -> Sequence[Any]:
            return [copy(GONE)]

    servers = {"a:1": Falling(GONE, q5=SUSPECT), **{f"dead{number}:1": Dead() for number in range(4)}}
    assert ask(PooledTransport(servers), QUESTIONS) == [f"answer to {question}" for question in QUESTIONS]


def test_looks_at_servers_leave_no_traces() -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))

    async def ask_one(first: FakeTransport, second: FakeTransport) -> None:
        tracer, pooled = provider.get_tracer("tests"), PooledTransport({"a:1": first, "b:1": second})
        async with AsyncClient(transport=pooled, retry=Retry(attempts=1), tracer=tracer) as client:
            await (one := Asker(client, 60.0)).begin()  # at a, so that b is asked next
            assert (await one.ask(lambda client: client.ask(None, "why"))).text == "answer to why"

    first, second = Falling(GONE), Falling(GONE, why=1)
    asyncio.run(ask_one(first, second))
    spans = [span for span in memory.get_finished_spans() if span.name == "chat vlm"]
    assert first.times[PROBE] and second.times[PROBE] and len(spans) == first.times["why"] + second.times["why"] == 2


def test_a_job_begins_where_one_server_of_several_answers() -> None:
    async def begin(*transports: FakeTransport) -> None:
        pool = PooledTransport({f"host{number}:1": each for number, each in enumerate(transports)})
        async with AsyncClient(transport=pool, retry=Retry(attempts=1)) as client:
            await Asker(client, patience).begin(told.append)

    told: list[str] = []
    patience = 0.0
    away = FakeTransport([[GONE]] * 99)
    asyncio.run(begin(away, FakeTransport()))
    with pytest.raises(ConnectionFailed, match="the line broke"):
        asyncio.run(begin(away, away))
    assert not told
    # A job may be started before its server.
    patience = 60.0
    asyncio.run(begin(FakeTransport([[GONE]] * 30)))
    assert told == [f"waiting up to 60 s for localhost:8001: {GONE.message}"]
    with pytest.raises(ServerError):  # which waiting does not mend
        asyncio.run(begin(FakeTransport([[ServerError("broken")]] * 30)))
