"""The launcher against a real tritonserver, on a toy repository that starts in under a second."""

import glob
import http.client
import os
import queue
import signal
import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from http_door import post
from toy_servers import BROKEN, CRASHING, ECHO, SLOW, STARVED, Launched, add_model, all_gone, is_stub, wait_until

from tessera.launcher import process
from tessera.launcher.guard import descendants, lock_path
from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server, ServerStartError

pytestmark = pytest.mark.server


@pytest.fixture
def options(toys: Path, tmp_path: Path) -> ServerOptions:
    return ServerOptions(toys, http_port=0, grpc_port=0, metrics_port=0, log_path=tmp_path / "log", exit_timeout_s=1)


@pytest.fixture
def launched(toys: Path, tmp_path: Path) -> Iterator[Launched]:
    with Launched(toys, tmp_path / "log") as running:
        yield running


def echo(client: grpcclient.InferenceServerClient, text: str, model: str = "echo") -> str:
    tensor = grpcclient.InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], object))
    return client.infer(model, [tensor]).as_numpy("OUT")[0].decode()


def environment_of(server: Server) -> str:
    """Its temporary folder, as its guard keeps it for a sweep."""
    return Path(lock_path(server.shm_prefix)).read_text()


def ask_count(client: grpcclient.InferenceServerClient, wanted: int) -> None:
    tensor = grpcclient.InferInput("IN", [1], "INT32")
    tensor.set_data_from_numpy(np.array([wanted], np.int32))
    client.async_stream_infer("count", [tensor])


def test_a_ready_server_answers_and_a_stopped_one_leaves_nothing(options: ServerOptions) -> None:
    with Server(options) as server:
        pids = [server.pid, *server.stub_pids().values()]
        assert server.models == ("count", "echo")
        assert sorted(server.stub_pids()) == ["count_0_0", "echo_0_0"]
        assert server.failure() is None
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            assert echo(client, "Grüße") == "Grüße"
            answers: queue.Queue[int] = queue.Queue()
            client.start_stream(lambda result, error: answers.put(int(result.as_numpy("OUT")[0])))
            ask_count(client, 3)
            assert [answers.get(timeout=5) for _ in range(3)] == [0, 1, 2]
        with urllib.request.urlopen(server.metrics_url, timeout=5) as page:
            assert b'nv_inference_request_success{model="echo"' in page.read()
        ours = glob.glob(f"/dev/shm/{server.shm_prefix}*")
        assert len(list(filter(os.path.isfile, ours))) == 2  # a region for each stub
    assert all_gone(pids)
    assert not any(os.path.exists(path) for path in ours)
    server.stop()  # once more does no harm


def test_sigterm_ends_it_in_ten_seconds_in_spite_of_idle_connections_and_open_streams(launched: Launched) -> None:
    regions = launched.regions()
    assert regions and launched.ready_line.startswith("tessera: ready in ")
    idle = http.client.HTTPConnection(launched.url("http"))
    idle.request("GET", "/v2/health/ready")
    assert idle.getresponse().read() == b""
    client = grpcclient.InferenceServerClient(launched.url("grpc"))
    answers: queue.Queue[object] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(result))
    ask_count(client, -1)
    answers.get(timeout=5)

    launched.process.send_signal(signal.SIGTERM)
    assert launched.process.wait(10) == 0
    assert all_gone(launched.pids)
    assert not any(os.path.exists(path) for path in regions)
    client.stop_stream(cancel_requests=True)
    client.close()
    idle.close()


def test_a_killed_launcher_takes_the_server_along(launched: Launched) -> None:
    regions = launched.regions()
    assert regions and len(launched.pids) == 4  # guard, tritonserver, two stubs
    launched.process.kill()
    assert wait_until(lambda: all_gone(launched.pids))
    assert wait_until(lambda: not any(os.path.exists(path) for path in regions))


def test_a_killed_guard_leaves_nothing_either(options: ServerOptions) -> None:
    with Server(options) as server:
        assert server._guard is not None
        pids = [server.pid, *server.stub_pids().values()]
        server._guard.kill()
        assert wait_until(lambda: server.failure() == "tritonserver ended: its guard process was killed")
    assert wait_until(lambda: all_gone(pids))
    assert not glob.glob(f"/dev/shm/{server.shm_prefix}*")


def test_a_dead_stub_is_a_failure_until_its_model_is_loaded_again_and_so_is_a_dead_server(
    options: ServerOptions,
) -> None:
    with Server(replace(options, extra_flags=("--model-control-mode=explicit", "--load-model=*"))) as server:
        victim = server.stub_pids()["echo_0_0"]
        os.kill(victim, signal.SIGKILL)
        assert wait_until(lambda: server.failure() is not None)
        assert server.failure() == f"the Python process of 'echo_0_0' (process {victim}) died"
        for action in ("unload", "load"):
            post(f"{server.http_url}/v2/repository/models/echo/{action}", {})
        assert wait_until(lambda: server.failure() is None)
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            assert echo(client, "again") == "again"
        left = [*glob.glob(f"/dev/shm/{server.shm_prefix}*"), environment_of(server)]
        os.kill(server.pid, signal.SIGKILL)
        assert wait_until(lambda: server.failure() is not None)
        assert server.failure() == server.failure() == "tritonserver ended: killed by signal 9"
    assert not any(map(os.path.exists, left))


def test_a_model_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    add_model(folder, "broken", BROKEN, "TYPE_INT32")
    add_model(folder, "echo", ECHO, "TYPE_STRING")
    with Launched(folder, tmp_path / "log") as running:
        assert running.process.wait(10) == 1 and running.ready_line == ""
    (line,) = running.errors().splitlines()
    assert line.startswith("tessera: model 'broken' failed to load: ValueError: weights of layer 3 are missing [")


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        # More than any machine has: what a container with a small /dev/shm says, with another number.
        (f"--backend-config=python,shm-default-byte-size={1 << 46}", "shared memory is too small: /dev/shm has .* MB"),
        ("--no-such-flag", "unrecognized option '--no-such-flag'"),
    ],
)
def test_what_the_server_refuses_is_said(options: ServerOptions, flag: str, words: str) -> None:
    with pytest.raises(ServerStartError, match=words):
        Server(replace(options, extra_flags=(flag,))).start()


def test_two_first_starts_at_once(options: ServerOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    servers = [Server(replace(options, log_path=tmp_path / f"log{i}")) for i in range(2)]
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda server: server.start(), servers))
        assert [server.failure() for server in servers] == [None, None]
        folders = set(map(environment_of, servers))
        assert len(folders) == 2 and all(map(os.path.isdir, folders))
        for server in servers:  # no clean end, so that each must find its own temporary folder
            os.kill(server.pid, signal.SIGKILL)
    finally:
        for server in servers:
            server.stop()
    assert not any(map(os.path.exists, folders))


def test_a_picked_port_that_was_taken_meanwhile_is_picked_again(
    options: ServerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        picked, bad = process.hold_ports, taken.getsockname()[1]
        choices = iter([{"metrics_port": bad}, {}])
        monkeypatch.setattr(process, "hold_ports", lambda *those: replace(picked(*those), **next(choices)))
        with Server(options) as server:
            assert server.options.metrics_port != bad and server.failure() is None


@pytest.mark.parametrize("crashes", [1, 3])
def test_a_server_that_crashes_in_its_start_is_started_again_but_not_for_ever(
    options: ServerOptions, tmp_path: Path, crashes: int
) -> None:
    folder, marks = tmp_path / "models", tmp_path / "marks"
    add_model(folder, "crashing", CRASHING.format(marks=str(marks), crashes=crashes), "TYPE_INT32")
    server = Server(replace(options, model_repository=folder))
    if crashes == 1:
        with server:
            assert server.failure() is None
    else:
        with pytest.raises(ServerStartError, match="tritonserver ended: killed by signal 6"):
            server.start()
    told = [crash.partition(" (log")[0] for crash in server.crashes]
    assert told == ["tritonserver ended: killed by signal 6"] * min(crashes, 2)
    assert len(marks.read_text()) == min(crashes + 1, 3)
    assert server.pid == 0 and not glob.glob(f"/dev/shm/{server.shm_prefix}*")


def test_a_server_that_is_not_ready_in_time_is_ended(options: ServerOptions, tmp_path: Path) -> None:
    add_model(tmp_path / "models", "slow", SLOW, "TYPE_INT32")
    server = Server(replace(options, model_repository=tmp_path / "models", ready_timeout_s=0.5))
    with pytest.raises(ServerStartError, match=r"not ready after 0.5 s \(--ready-timeout\)"):
        server.start()
    assert server.pid == 0 and not glob.glob(f"/dev/shm/{server.shm_prefix}*")


def test_a_stop_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    add_model(tmp_path / "models", "slow", SLOW, "TYPE_INT32")
    with Launched(tmp_path / "models", tmp_path / "log", wait=False) as running:
        # A start that tritonserver itself breaks off is begun again meanwhile, and what it forks may be there briefly.
        assert wait_until(lambda: any(map(is_stub, descendants(running.process.pid))), seconds=60)
        pids = descendants(running.process.pid)
        running.process.terminate()
        assert running.process.wait(10) == 0
        assert all_gone(pids)


def test_a_stage_without_processor_time_is_waited_for(options: ServerOptions, tmp_path: Path) -> None:
    """In tritonserver's own second it is given up: the start hangs, and the request after a failed one is a crash."""
    add_model(tmp_path / "models", "starved", STARVED, "TYPE_STRING")
    with Server(replace(options, model_repository=tmp_path / "models", ready_timeout_s=30.0)) as server:
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            assert [echo(client, text, "starved") for text in "abc"] == ["a", "b", "c"]
        assert server.crashes == () and server.failure() is None
