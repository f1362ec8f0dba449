"""The soak's requests to a gateway: each ends as it should, or that is noticed. The server is a stand-in."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import openai
import pytest
from clients.fake_transport import FakeTransport, Hang, final
from gateway_doubles import Asked, listening
from soak import Door

from tessera_client import Delta, InvalidRequest
from tessera_gateway.settings import Settings

PICTURE = b"\xff\xd8 a picture"


@pytest.fixture
def fake() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def door(fake: FakeTransport) -> Iterator[Door]:
    with listening(Asked(fake, Settings()).app) as address:
        yield Door(address.rpartition("//")[2], os.getpid())


def test_answers_whole_streamed_and_left(door: Door, fake: FakeTransport) -> None:
    fake.script = [[final("yes")], [Delta("a"), final("b", "length")], [Delta("a"), Hang()]]
    assert door.ask(PICTURE, "?").choices[0].finish_reason == "stop"
    assert door.streamed(PICTURE, "?", 2) == "length"
    door.left(PICTURE, "?")
    assert door.processes[os.getpid()] == "gateway"


def test_a_stream_that_ends_early_is_a_fault(door: Door, fake: FakeTransport) -> None:
    fake.script = [[Delta("a"), InvalidRequest("no")], [final()]]
    with pytest.raises(openai.APIError):
        door.streamed(PICTURE, "?", 2)
    with pytest.raises(AssertionError, match="no words"):
        door.left(PICTURE, "?")


def test_what_must_be_refused(door: Door, fake: FakeTransport) -> None:
    dice, refuse = random.Random(1), [InvalidRequest("no picture")]
    for _ in range(12):
        fake.script = [refuse]
        door.refused(PICTURE, "?", dice)
    with pytest.raises(AssertionError, match="was answered"):
        for _ in range(20):
            fake.script = [[final("yes")]]
            door.refused(PICTURE, "?", dice)
