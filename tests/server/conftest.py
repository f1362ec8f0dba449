"""A picture that no training has seen, the SDK's ways to the shared server, the server of documents, and toy models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_servers import COUNT, ECHO, MAY_MOUNT, REPOSITORY, Launched, add_model, memory_of

import scene
from tessera.launcher.process import Server
from tessera_client import Client, Models


@pytest.fixture(scope="session")
def picture() -> bytes:
    return scene.encode_jpeg(scene.sample(7, "heldout"))


@pytest.fixture(scope="session")
def doors(server: Server) -> Iterator[dict[str, Client]]:
    with (
        Client(server.grpc_url) as grpc,
        Client(server.http_url) as http,
        Client(server.grpc_url, models=Models(vlm="vlm_stream")) as front,
    ):
        yield {"grpc": grpc, "http": http, "front": front}


@pytest.fixture(scope="session")
def client(doors: dict[str, Client]) -> Client:
    return doors["grpc"]


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """`tessera serve --default documents`; where one may mount, with Docker's default of /dev/shm.

    Its regions grow with the first page and stay so: test_full_shared_memory comes before test_readme.
    """
    log = tmp_path_factory.mktemp("documents") / "log"
    through = memory_of("64m") if MAY_MOUNT else ()
    with Launched(REPOSITORY, log, "--default", "documents", through=through) as running:
        yield running


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose server starts in under a second."""
    folder = tmp_path_factory.mktemp("toys")
    add_model(folder, "echo", ECHO, "TYPE_STRING")
    add_model(folder, "count", COUNT, "TYPE_INT32", decoupled=True)
    return folder
