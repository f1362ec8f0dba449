"""Leases against stand-ins for their clients."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fakes.backend import InferenceRequest, Tensor, strings, wait_until

from tessera.errors import InvalidRequest
from tessera.tritonserver import engine_busy, leases, tensors
from tessera.tritonserver import preprocess as preprocess
from tessera.tritonserver import vision as vision
from tessera.tritonserver.failures import is_over as is_past
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
def house(backend: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[House]:
    monkeypatch.setattr(leases, "WATCH_SECONDS", 0.005)
    monkeypatch.setattr(leases, "FOLDER", str(tmp_path / "leases"))
    house = House()
    yield house
    house.leases.stop()


def test_a_client_that_is_gone_takes_its_own_work_along_at_every_stage(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of earlier stages, where requests wait; but not for ever, or the folder would fill."""
    gone, stays = house.open("../gone"), house.open("stays")
    assert not leases.is_over("../gone") and not leases.is_over("")
    gone.sender.cancelled = True
    wait_until(lambda: gone.sender.final)
    assert not stays.sender.final and house.cancelled == ["../gone"]
    assert leases.is_over("../gone") and leases.is_over("stays ../gone") and not leases.is_over("stays")
    house.leases.end("second")
    assert leases.is_over("../gone")
    monkeypatch.setattr(leases, "TOLD_SECONDS", -1.0)
    house.leases.end("third")
    assert not any(map(leases.is_over, ("../gone", "second", "third")))


def test_a_lease_given_back_is_watched_no_more(house: House) -> None:
    request = house.open("a")
    for _ in range(2):  # it may not be there
        house.leases.end("a")
    assert request.sender.final and house.cancelled == ["a", "a"]
    house.open("b").sender.cancelled = True  # asking the first one's sender after FINAL would fail the watcher
    wait_until(lambda: "b" in house.cancelled)


def test_names_that_cannot_be(house: House) -> None:
    house.open("a")
    with pytest.raises(InvalidRequest, match="held already"):
        house.open("a")
    for name in ("", "a b"):
        with pytest.raises(InvalidRequest, match="must be one name"):
            house.open(name)


def test_the_end_of_the_stage_ends_them(house: House) -> None:
    request = house.open("a")
    house.leases.stop()
    assert request.sender.final and house.cancelled == []
    assert not Path(leases.FOLDER).exists()


def test_the_lease_a_request_names(backend: object) -> None:
    assert tensors.lease(InferenceRequest([])) == ""
    named = InferenceRequest([], parameters='{"tessera-lease": "a"}')
    assert tensors.lease(named) == "a" and tensors.sampling(named, "sampling_parameters") == {}
    with pytest.raises(InvalidRequest, match="must be text, not 3"):
        tensors.lease(InferenceRequest([], parameters='{"tessera-lease": 3}'))


def test_since_when_a_request_waits_is_the_servers_own_word(backend: object) -> None:
    assert tensors.since(InferenceRequest([])) == 0
    named = InferenceRequest([], parameters='{"tessera-since": "7"}')
    assert tensors.since(named) == 7 and tensors.sampling(named, "sampling_parameters") == {}
    job = vision.StageJob(named)
    with pytest.raises(InvalidRequest, match="wants PIXELS"):
        job.read(named)
    assert job.since_ns == 7
    for value in ("7", '"-7"', '"x"', f'"{10**18}"', f'"{"9" * 5000}"'):
        with pytest.raises(InvalidRequest, match="'tessera-since' is the server's own"):
            tensors.since(InferenceRequest([], parameters=f'{{"tessera-since": {value}}}'))


def test_no_stage_works_for_who_has_gone(house: House) -> None:
    house.leases.end("gone")
    request = InferenceRequest([strings("text_input", b"?")], parameters='{"tessera-lease": "other gone"}')
    (answer,) = preprocess.TritonPythonModel().execute([request])  # it has no preprocessor
    assert answer.error().code() == "CANCELLED"

    request = InferenceRequest([Tensor("STAMPS", np.zeros((1, 4), np.int64))], parameters='{"tessera-lease": "gone"}')
    job = vision.StageJob(request)
    assert not job.read(request)  # its pixels are not even looked at
    assert "deadline" in request.sender.responses[0].error().message()

    waits = InferenceRequest([Tensor("STAMPS", np.zeros((1, 4), np.int64))], parameters='{"tessera-lease": "later"}')
    job = vision.StageJob(waits)
    with pytest.raises(InvalidRequest, match="wants PIXELS"):
        job.read(waits)
    assert not is_past(job.deadline_ns)
    house.leases.end("later")
    assert is_past(job.deadline_ns)


def test_the_vision_stage_hears_whether_the_engine_is_busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine_busy, "_FILE", str(tmp_path / "leases" / "engine-busy"))
    engine_busy.tell(True)  # before the folder is there
    assert not engine_busy.told()
    (tmp_path / "leases").mkdir()
    for busy in (True, True, False, False, True):
        engine_busy.tell(busy)
        assert engine_busy.told() == busy
