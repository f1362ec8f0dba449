"""Command line -> options -> tritonserver's flags and environment."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tessera.errors import ConfigError
from tessera.launcher.cli import parse, serve_main
from tessera.launcher.installation import Installation
from tessera.launcher.options import ServerOptions, mps_control, one_per_gpu, server_environment, server_flags
from tessera.launcher.settings import ServerSetup
from tessera.launcher.starting import log_path
from tessera.settings import gpu
from tessera.settings.gpu import divide
from tessera_gateway.settings import add_options

INSTALLATION = Installation(Path("/s"), (Path("/l1"), Path("/l2")))

CPU = ServerSetup({}, [], "cpu")


def test_the_command_line_becomes_options_and_flags(tmp_path: Path) -> None:
    argv = ["--model-repository", str(tmp_path), "--http-port", "0", "--model-config-name", "tensorrt"]
    passed_on = ["--model-control-mode=poll", "--cache-config", "local,size=1"]
    options, gpus, supervision, own = parse([*argv, "--verbose", "--deterministic", "--", *passed_on])
    assert own.verbose and not own.show_settings and gpus == () and options.settings == {"deterministic": "on"}
    assert options.http_port == 0 and options.grpc_port == 8001 and options.host == "127.0.0.1"
    assert supervision.restart and supervision.health_port == 8003
    (tmp_path / "s" / "backends").mkdir(parents=True)
    installation = Installation(tmp_path / "s")
    flags = server_flags(
        options.with_ports({"http": 1, "grpc": 2, "metrics": 3}), installation, "prefix-", CPU, tmp_path
    )
    assert flags[-3:] == passed_on
    assert "--model-control-mode=none" not in flags
    assert {"--http-port=1", "--grpc-port=2", "--metrics-port=3", "--http-address=127.0.0.1"} <= set(flags)
    assert {"--model-config-name=tensorrt", f"--model-repository={tmp_path}"} <= set(flags)
    assert "--backend-config=python,shm-region-prefix-name=prefix-" in flags
    assert f"--backend-directory={tmp_path}/s/backends" in flags and "--cache-directory" not in str(flags)


def test_every_option_of_the_gateway_is_passed_on_as_it_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--keys", "my keys", "--grpc-port", "7", "--model-name=a, b", "--max-tokens", "9", "--only", "vlm"]
    options, _, _, own = parse(["--model-repository", str(tmp_path), *argv], add_options)
    assert own.gateway == ("--keys=my keys", "--max-tokens=9", "--model-name=a, b") and options.grpc_port == 7
    assert parse([], add_options)[3].gateway == ()
    declared: dict[str, dict[str, Any]] = {}
    add_options(lambda flag, **how: declared.update({flag: how}))
    with pytest.raises(SystemExit):
        parse(["--help"], add_options)
    said = capsys.readouterr().out
    assert all(flag in said for flag in declared) and "SUPPRESS" not in said


BATCHES, NO_GATEWAY = "--batch-folder=batches", "--batch-folder is for the gateway, which"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([BATCHES, "--openai-port", "0"], NO_GATEWAY),
        ([BATCHES, "--only", "vision_encoder"], NO_GATEWAY),
        (["--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'"),
        (["--model-name", "a,"], "'a,' holds an empty name"),
        (["--max-tokns", "9"], "there is no option --max-tokns; did you mean --max-tokens?"),
        (["--default", "document"], "choose from 'rooms', 'documents'"),
        (["--default", "documents", "--checkpoint", "."], "both say which model"),
        *(([f"--gpus={text}"], "--gpus") for text in ("", "0,", "all", "0,0", "-1", "1/2")),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(argv, add_options)
    assert words in capsys.readouterr().err


def test_the_models_that_come_with_the_source_are_asked_for_by_name(tmp_path: Path) -> None:
    repository, folders = tmp_path / "model_repository", ("default_model", "document_model")
    for folder in folders:
        (tmp_path / "build" / folder / "checkpoint").mkdir(parents=True)
    found = [parse(["--model-repository", str(repository), "--default", name])[0] for name in ("rooms", "documents")]
    assert [each.checkpoint for each in found] == [tmp_path / "build" / folder / "checkpoint" for folder in folders]
    assert parse(["--model-repository", str(repository)])[0].checkpoint is None  # the stages' own default, rooms


@pytest.mark.parametrize("gpu", [True, False])
def test_memory_pools_follow_the_gpu_and_clients_are_kept_out_of_the_administration(tmp_path: Path, gpu: bool) -> None:
    """Loading a model is running code; shared-memory endpoints reach the stubs' own regions."""
    setup = ServerSetup({}, [], "cuda", divide(80 << 30, 0.9, (0, 0))) if gpu else CPU
    given = server_flags(ServerOptions(tmp_path), INSTALLATION, "p", setup, tmp_path)
    flags = {name: value for name, _, value in (flag.partition("=") for flag in given)}
    assert flags.get("--cuda-memory-pool-byte-size") == ("0:4294967296" if gpu else None)
    assert ("--pinned-memory-pool-byte-size" in flags) == (not gpu)
    assert {flags[f"--{door}-address"] for door in ("http", "grpc", "metrics")} == {"127.0.0.1"}
    assert flags["--model-control-mode"] == "none"
    for name in ("--http-restricted-api", "--grpc-restricted-protocol"):
        endpoints, key = flags[name].split(":")
        assert set(endpoints.split(",")) == {"shared-memory", "trace", "logging"}
        assert len(key.partition("=")[2]) >= 32


def test_an_mps_daemon_is_ours_where_there_is_a_gpu_and_nobody_elses(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-cuda-mps-control"
    program.touch(0o755)
    environment, options = {"PATH": str(tmp_path)}, ServerOptions(tmp_path)
    assert mps_control(options, environment, "cpu") is None
    assert mps_control(options, environment, "cuda") == str(program)
    assert mps_control(options, {"PATH": "/nowhere"}, "cuda") is None
    assert mps_control(options, {**environment, "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}, "cuda") is None
    assert mps_control(options, {**environment, "CUDA_VISIBLE_DEVICES": "MIG-0123"}, "cuda") is None
    unwanted, *_ = parse(["--model-repository", str(tmp_path), "--no-mps"])
    assert mps_control(unwanted, environment, "cuda") is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--", "--http-port=9"], "--http-port cannot be passed on"),
        (["--", "--metrics-interval-ms", "500", "--exit-timeout-secs"], "--exit-timeout-secs cannot be passed on"),
        (["--metrics-port", "70000"], "--metrics-port is 70000"),
        (["--health-port", "70000"], "--health-port"),
        (["--max-restarts", "-1"], "--max-restarts"),
        (["--ping-timeout", "0"], "--ping-timeout"),
    ],
)
def test_what_is_out_of_range_or_the_launchers_own_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(argv)


def test_the_environment_puts_this_python_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.setenv("TESSERA_DTYPE", "float32")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    options = ServerOptions(tmp_path, checkpoint=Path("model"), environment={"TESSERA_X": "1"})
    environment = server_environment(options, INSTALLATION, options.set_up())
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert environment["LD_LIBRARY_PATH"] == "/l1:/l2:/mine"
    assert environment["TESSERA_CHECKPOINT"] == str(tmp_path / "model")
    assert environment["TESSERA_DTYPE"] == "float32" and environment["TESSERA_X"] == "1"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    bare = replace(INSTALLATION, library_path=())
    assert "LD_LIBRARY_PATH" not in server_environment(options, bare, CPU)


HEAPS = """
import ctypes, sys, threading
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
here, go_on = threading.Barrier(int(sys.argv[1]) + 1), threading.Event()
def work():
    libc.malloc(1000)
    here.wait()
    go_on.wait()
for _ in range(int(sys.argv[1])):
    threading.Thread(target=work).start()
here.wait()
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
go_on.set()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="another C library than glibc")
def test_a_process_of_many_threads_keeps_few_heaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def heaps(environment: Mapping[str, str]) -> int:
        command = [sys.executable, "-c", HEAPS, str(8 * limit + 4)]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return told.stdout.count("<heap nr=")

    limit = max(2, os.cpu_count() or 1)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    given = server_environment(ServerOptions(tmp_path, environment={"MALLOC_ARENA_MAX": "3"}), INSTALLATION, CPU)
    assert given["MALLOC_ARENA_MAX"] == "3"
    assert heaps(server_environment(ServerOptions(tmp_path), INSTALLATION, CPU)) <= limit < heaps(os.environ)


def test_one_server_per_gpu_with_ports_of_its_own(tmp_path: Path) -> None:
    base, host = 20000, "127.0.0.3"  # where nobody else has ports
    ports = [word for i, kind in enumerate(("http", "grpc", "metrics")) for word in (f"--{kind}-port", str(base + i))]
    given = [*ports, "--host", host, "--model-repository", str(tmp_path), "--gpus", "3, GPU-5ac2-11"]
    options, gpus, _, _ = parse(given)
    first, second = one_per_gpu(options, gpus)
    assert [*first.ports.values()] == [base, base + 1, base + 2]
    assert [*second.ports.values()] == [base + 10, base + 11, base + 12]
    for server, number, port in ((first, "3", base + 1), (second, "GPU-5ac2-11", base + 11)):
        environment = server_environment(server, INSTALLATION, CPU)
        assert environment["CUDA_VISIBLE_DEVICES"] == number and server.name == f"gpu{number}"
        assert environment["TESSERA_GRPC_ADDRESS"] == f"{host}:{port}"
    assert log_path(replace(first, log_path=Path("/x/server.log"))) == Path("/x/server-gpu3.log")
    assert log_path(first).name != log_path(second).name
    free = ServerOptions(tmp_path, http_port=0, grpc_port=0, metrics_port=0)
    picked = [port for each in one_per_gpu(free, ["0", "1"]) for port in each.ports.values()]
    assert len(set(picked)) == 6 and 0 not in picked


def test_ports_of_several_servers_that_collide_or_overflow_are_named(tmp_path: Path) -> None:
    host = "127.0.0.2"  # where nobody else has ports, the first server's least of all
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        options = ServerOptions(tmp_path, host=host, http_port=0, grpc_port=port - 10, metrics_port=0)
        with pytest.raises(ConfigError, match=rf"port {port} on {host} is already in use \(--grpc-port of gpu1\)"):
            one_per_gpu(options, ["0", "1"])
    with pytest.raises(ConfigError, match="--http-port of gpu1"):
        one_per_gpu(ServerOptions(tmp_path, http_port=20000, grpc_port=20010, metrics_port=0), ["0", "1"])
    with pytest.raises(ConfigError, match="--metrics-port is 65539"):
        one_per_gpu(ServerOptions(tmp_path, http_port=0, grpc_port=0, metrics_port=65529), ["0", "1"])


def test_gpus_without_a_gpu_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(gpu, "TRACES_OF_GPUS", ())
    monkeypatch.delenv("TESSERA_DEVICE", raising=False)
    assert serve_main(["--gpus", "0", "--show-settings"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert "--gpus 0 asks for a GPU, but this machine has no NVIDIA GPU" in shown.err
    assert serve_main(["--gpus", "0", "--device", "cpu", "--show-settings"]) == 0  # told on purpose


def test_signals_are_the_callers_again_where_nothing_was_served(capsys: pytest.CaptureFixture[str]) -> None:
    """A process that is forked later, a loader's worker, would not end by SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        serve_main(["--no-such-option"])
    assert "--no-such-option" in capsys.readouterr().err and signal.getsignal(signal.SIGTERM) is before
