"""`bits` asks every request alone and again beside others, and finds any bit that is another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from bench import bits
from bench.bits import Case, ask_all, cases, differ
from serving import DEFAULT_CHECKPOINT

from tessera.models.registry import read_config
from tessera_client import Answer


def answer(text: str, *logprobs: float) -> Answer:
    return Answer(text, "stop", None, None, [{"token_id": 1, "logprob": each, "top": []} for each in logprobs], "", 0.0)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (answer("a", -0.5, 0.0), (False, None)),
        (answer("a", -0.5, -0.0), (False, 1)),
        (answer("a", -0.5), (True, 1)),
        (answer("b", -0.5, 0.0), (True, None)),
    ],
)
def test_any_bit_counts(other: Answer, found: tuple[bool, int | None]) -> None:
    assert differ(answer("a", -0.5, 0.0), other) == found


def test_requests_are_the_same_each_time_and_as_the_report_says() -> None:
    model = read_config(DEFAULT_CHECKPOINT)
    asked = cases(range(40), model, 8192)
    assert asked[7:9] == cases((7, 8), model, 8192)
    assert sum(each.options["max_tokens"] >= 256 for each in asked) == 12 == sum(map(bool, (a.pictures for a in asked)))
    assert sum("seed" in each.options for each in asked) == 10
    assert {each.options["logprobs"] for each in asked} == {5}
    assert len(min(asked, key=lambda each: len(each.question)).question) < 400 < 4000 < len(asked[2].question)


class Counting:
    """A client that answers with the question and counts what it was asked, and what was left."""

    asked: dict[str, list[dict[str, Any]]]
    left: int

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *error: object) -> None: ...

    def ask(self, pictures: list[bytes], question: str, **options: Any) -> Answer:
        self.asked.setdefault(question, []).append(options)
        return answer(question)

    @contextmanager
    def stream(self, pictures: list[bytes], question: str, **options: Any) -> Iterator[list[str]]:
        yield ["first"]
        type(self).left += 1


@pytest.mark.parametrize(("in_flight", "left"), [(1, 0), (4, 1), (16, 22)])
def test_each_is_asked_once_beside_some_that_are_left(
    monkeypatch: pytest.MonkeyPatch, in_flight: int, left: int
) -> None:
    Counting.asked, Counting.left = {}, 0
    monkeypatch.setattr(bits, "Client", lambda *given, **how: Counting())
    asked = [Case([], f"{number}", {"max_tokens": 1}, {"priority": number}) for number in range(10)]
    half = threading.Event()
    assert [each.text for each in ask_all(["there"], asked, in_flight, half)] == [each.question for each in asked]
    assert half.is_set() and Counting.left == left
    extra: list[dict[str, Any]] = [each.beside if in_flight > 1 else {} for each in asked]
    assert Counting.asked == {each.question: [each.options | more] for each, more in zip(asked, extra)}
