"""Leases against stand-ins for their clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes.backend import InferenceRequest, wait_until

from tessera.errors import InvalidRequest
from tessera.tritonserver import leases, tensors
from tessera.tritonserver.leases import Leases
from tessera.tritonserver.responder import Responder


class House:
    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.leases = Leases(self.cancelled.append)

    def open(self, name: str) -> InferenceRequest:
        request = InferenceRequest([])
        self.leases.open(name, Responder(request))
        return request


@pytest.fixture
def house(backend: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(leases, "WATCH_SECONDS", 0.005)
    house = House()
    yield house
    house.leases.stop()


def test_a_client_that_is_gone_takes_its_own_work_along(house: House) -> None:
    gone, stays = house.open("gone"), house.open("stays")
    gone.sender.cancelled = True
    wait_until(lambda: "gone" in house.cancelled)
    assert gone.sender.final and not stays.sender.final
    assert set(house.cancelled) == {"gone"}


def test_what_comes_late_is_cancelled_too_but_not_for_ever(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "CANCEL_AGAIN_SECONDS", 0.1)
    house.open("gone").sender.cancelled = True
    wait_until(lambda: len(house.cancelled) > 1)
    wait_until(lambda: not house.leases._broken)
    told = len(house.cancelled)
    house.open("other").sender.cancelled = True
    wait_until(lambda: "other" in house.cancelled)
    assert house.cancelled.count("gone") == told


def test_a_lease_given_back_cancels_nothing_and_is_not_watched(house: House) -> None:
    request = house.open("a")
    house.leases.close("a")
    assert request.sender.final
    house.leases.close("a")  # and once only
    house.open("a")  # its watching would find the first one's sender asked after FINAL, which fails the thread
    house.open("b").sender.cancelled = True
    wait_until(lambda: "b" in house.cancelled)
    assert "a" not in house.cancelled


def test_names_that_cannot_be(house: House) -> None:
    house.open("a")
    with pytest.raises(InvalidRequest, match="held already"):
        house.open("a")
    with pytest.raises(InvalidRequest, match="empty"):
        house.open("")


def test_the_end_of_the_stage_ends_them(house: House) -> None:
    request = house.open("a")
    house.leases.stop()
    assert request.sender.final and house.cancelled == []


def test_the_lease_a_request_names(backend: object) -> None:
    assert tensors.lease(InferenceRequest([])) == ""
    named = InferenceRequest([], parameters='{"tessera-lease": "a"}')
    assert tensors.lease(named) == "a" and tensors.sampling(named, "sampling_parameters") == {}
    with pytest.raises(InvalidRequest, match="must be text, not 3"):
        tensors.lease(InferenceRequest([], parameters='{"tessera-lease": 3}'))
