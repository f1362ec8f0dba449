"""What tests of several folders share: a real tritonserver, and a stand-in for its Python backend."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes.backend import backend  # noqa: F401

from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: its kernels then run without a GPU


if find_spec("hypothesis"):
    from hypothesis import settings

    # The same examples in every run, whatever a run before has found.
    settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
    settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Of tests that are coroutines: those marked anyio."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Exported graphs and measured choices of the tests stay out of the user's own cache."""
    os.environ["TESSERA_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Whatever asks for more: the other core has another worker's test, and where a second thread waits for it, a layer
    of a tiny model takes a hundred times as long. The variable is read by servers that tests start."""
    os.environ["TESSERA_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.set_num_threads = lambda threads: None


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Triton's interpreter spends half of its time on what no test needs: whether each whole number overflows, for
    assertions that are off, the types of tuples, for the compiler, and a patch of the language, which a launch has
    made, for each function that a kernel calls."""
    if os.environ.get("TRITON_INTERPRET") and find_spec("triton"):
        from triton import language
        from triton.runtime import interpreter

        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
        language.core._type_for_tuple_values = lambda values, fields=None: None
        patch, whole = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": language, "core": language.core})
        interpreter._patch_lang = lambda function: patch(whole)  # a launch's: of both modules that functions name it by
        interpreter.InterpretedFunction.__call__ = lambda function, *given, **named: function.rewrite()(*given, **named)


REPOSITORY = Path(__file__).resolve().parents[1] / "model_repository"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The project's own model repository with its default checkpoint, started once for all tests."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    # It waits for connections that the fronts keep open to it: not for long, here.
    with Server(ServerOptions(REPOSITORY, **ports, log_path=log, exit_timeout_s=1)) as running:
        yield running
