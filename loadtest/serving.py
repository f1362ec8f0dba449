"""The one way in which a benchmark starts its server: the command `tessera serve`, of this tree or of another one.

Through the command, not the package, so that a benchmark can be run against another commit's server for a comparison:
both are then asked by the same load and counted by the same rule.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from figures import ROOT

DEFAULT_CHECKPOINT = ROOT / "build" / "default_model" / "checkpoint"
READY = re.compile(r"ready in ([\d.]+) s: grpc (\S+), http (\S+), metrics (\S+), health (\S+), ")
STOP_S = 30.0


@dataclass(frozen=True)
class Setup:
    """What a server is started with. Equal setups are equal servers."""

    checkpoint: Path = DEFAULT_CHECKPOINT
    gpus: tuple[str, ...] = ()
    """One server on each; none: one server on the CPU."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """"stage.parameter" -> value, where it is not the default."""
    random_weights: bool = False
    mps: bool = True
    restart: bool = False
    """Restart it when it dies; without, the run ends."""
    tree: Path = ROOT
    """The checkout whose server it is."""
    repository: Path | None = None
    """The model repository, where it is not the tree's."""
    log: Path | None = None
    """Where the server's log stays; None: it goes with the server."""
    only: str = ""
    """The models that it loads, with commas between; all."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What it has in its environment beside ours."""


@dataclass(frozen=True)
class Running:
    """A server's addresses; several where there are several GPUs."""

    grpc: list[str]
    http: list[str]
    metrics: list[str]
    health: str
    startup_s: float


@contextmanager
def serve(setup: Setup) -> Iterator[Running]:
    """The server, ready; ended with the context.

    Raises RuntimeError with what it said when it does not become ready, or when it dies meanwhile.
    """
    packages = [str(setup.tree / folder) for folder in ("python_backends", "clients")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(packages), **setup.environment}
    with tempfile.TemporaryDirectory(prefix="tessera-bench-") as folder:
        command = serve_command(setup, Path(folder))
        server = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        )
        try:
            yield _wait_ready(server)
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode}: {_rest(server)}")
        finally:
            server.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.wait(STOP_S)
            server.kill()
            server.wait()


@contextmanager
def gateway(servers: Sequence[str], workers: int = 1, *flags: str) -> Iterator[tuple[str, int]]:
    """A gateway before servers at these gRPC addresses: its host and port, and its process id."""
    command = [sys.executable, "-m", "tessera_gateway.cli", "--url", ",".join(servers), "--port", "0"]
    command += ["--workers", str(workers), *flags]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "ready: " not in line:
                raise RuntimeError(f"the gateway did not start: {line!r}")
            yield line.rpartition("//")[2].strip(), process.pid
        finally:
            process.terminate()


def serve_command(setup: Setup, folder: Path) -> list[str]:
    """The command line of `tessera serve`; its log goes into ``folder`` unless it is to stay."""
    repository = setup.repository or setup.tree / "model_repository"
    options = (setup.tree / "python_backends" / "tessera" / "launcher" / "cli.py").read_text()
    flags = ["--device", "cuda" if setup.gpus else "cpu"]
    weights = {"weights": "random"} if setup.random_weights else {}
    for name, value in {**weights, **setup.settings}.items():
        flags += ["--set", f"{name}={value}"]
    if setup.gpus:
        flags += ["--gpus", ",".join(setup.gpus)]
    if setup.only:
        flags += ["--only", setup.only]
    if not setup.mps:
        flags.append("--no-mps")
    for port in ("http", "grpc", "metrics", "health", "openai"):
        if port != "openai" or '"--openai-port"' in options:
            flags += [f"--{port}-port", "0"]
    return [
        *(sys.executable, "-m", "tessera.launcher.cli", *(() if setup.restart else ("--no-restart",))),
        *("--model-repository", str(repository), "--checkpoint", str(setup.checkpoint.resolve())),
        *("--log", str(setup.log or folder / "server.log"), *flags),
    ]


def _wait_ready(server: subprocess.Popen[str]) -> Running:
    assert server.stdout is not None
    said = []
    for line in server.stdout:
        said.append(line)
        if found := READY.search(line):
            seconds, grpc, http, metrics, health = found.groups()
            return Running(grpc.split(","), http.split(","), metrics.split(","), health, float(seconds))
    raise RuntimeError(f"the server did not start: {''.join(said[-5:]).strip()}")


def _rest(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    return server.stdout.read().strip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that :func:`setup` reads."""
    parser.add_argument("--gpus", default="0", help="numbers with commas between; empty for the CPU")
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_CHECKPOINT)
    parser.add_argument("--weights", choices=("checkpoint", "random"), default="checkpoint")
    parser.add_argument("--instances", nargs="*", default=[], metavar="STAGE=N")
    parser.add_argument(
        "--set", nargs="*", action="extend", default=[], metavar="STAGE.PARAMETER=VALUE", dest="settings"
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose server is measured")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep the server's log")
    parser.add_argument("--no-mps", action="store_true", help="stages take turns on the GPU, for comparison")


def setup(arguments: argparse.Namespace) -> Setup:
    """What the options ask for. Raises SystemExit for a pair that is none."""
    counts = {f"{stage}.instances": count for stage, count in pairs(arguments.instances, "STAGE=N").items()}
    return Setup(
        checkpoint=arguments.checkpoint,
        gpus=tuple(arguments.gpus.split(",")) if arguments.gpus else (),
        settings=counts | pairs(arguments.settings, "STAGE.PARAMETER=VALUE"),
        random_weights=arguments.weights == "random",
        mps=not arguments.no_mps,
        tree=arguments.tree.resolve(),
        log=arguments.log,
    )


def setup_notes(arguments: argparse.Namespace) -> dict[str, object]:
    """What belongs to a figure of the options."""
    tree = arguments.tree.resolve()
    told = {"settings": sorted([*arguments.instances, *arguments.settings])}
    return told if tree == ROOT else {**told, "tree": tree.name}


def pairs(given: list[str], expected: str) -> dict[str, str]:
    """NAME=VALUE arguments as a dictionary. Raises SystemExit for one that is none."""
    for pair in given:
        if not all(pair.partition("=")):
            raise SystemExit(f"expected {expected}, got {pair!r}")
    return dict(pair.split("=", 1) for pair in given)
