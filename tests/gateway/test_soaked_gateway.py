"""The soak's requests to a gateway: each ends as it should, or that is noticed. The server is a stand-in."""

from __future__ import annotations

import os
import random

import openai
import pytest
from clients.fake_transport import FakeTransport, Hang, final
from gateway_doubles import served
from soak import Door

from tessera_client import Delta, InvalidRequest

PICTURE = b"\xff\xd8 a picture"


def test_what_is_no_whole_answer_or_no_refusal_is_noticed() -> None:
    dice, fake = random.Random(1), FakeTransport()
    with served(fake=fake) as (_, address):
        door = Door(address.rpartition("//")[2], os.getpid())
        assert door.processes[os.getpid()] == "gateway"
        fake.script = [[final("yes")], [Delta("a"), final("b", "length")], [Delta("a"), Hang()]]
        assert door.ask(PICTURE, "?").choices[0].finish_reason == "stop"
        assert door.streamed(PICTURE, "?", 2) == "length"
        door.left(PICTURE, "?")
        fake.script = [[Delta("a"), InvalidRequest("no")], [final()]]
        with pytest.raises(openai.APIError):
            door.streamed(PICTURE, "?", 2)
        with pytest.raises(AssertionError, match="no words"):
            door.left(PICTURE, "?")
        for _ in range(12):
            fake.script = [[InvalidRequest("no picture")]]
            door.refused(PICTURE, "?", dice)
        with pytest.raises(AssertionError, match="was answered"):
            for _ in range(20):
                fake.script = [[final("yes")]]
                door.refused(PICTURE, "?", dice)
