"""A gateway behind a port for all tests of a file, OpenAI's own client of it, and what its servers answer."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from gateway_doubles import Asked, client_of, served


@pytest.fixture(scope="module")
def door() -> Iterator[tuple[Asked, str]]:
    with served() as door:
        yield door


@pytest.fixture
def play(door: tuple[Asked, str]) -> Any:
    """Sets the script of the next requests."""
    door[0].fake.requests.clear()
    door[0].fake.cancelled.clear()
    return lambda *script: door[0].fake.script.extend(script)


@pytest.fixture(scope="session", autouse=True)
def without_proxy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield


@pytest.fixture
def client(door: tuple[Asked, str]) -> Iterator[openai.OpenAI]:
    with client_of(door[1]) as client:
        yield client
