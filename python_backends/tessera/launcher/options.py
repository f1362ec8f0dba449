"""What one server is started with, and the tritonserver flags that follow from it.

The three ports of each server: asked for, derived, or picked.
"""

from __future__ import annotations

import errno
import os
import random
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tessera
from tessera.errors import ConfigError
from tessera.launcher.installation import Installation, find_installation
from tessera.launcher.settings import INSTANCES, SHARED_MEMORY, ServerSetup, lay_out, regions, set_up
from tessera.settings.schema import check, setting
from tessera_wire.tensors import local_address

SERVICES = ("http", "grpc", "metrics")
# Between the ports of one server and the next.
APART = 10
# Where free ports are picked: below those that Linux gives to outgoing connections, one of which could otherwise take
# a picked port before tritonserver has it.
PICKED = range(20_000, 32_768)
TRIES = 20
# The launcher gives these flags itself and relies on their values; a second one would win silently.
RESERVED_FLAGS = (
    *("--model-repository", "--model-store", "--model-config-name", "--log-file", "--exit-timeout-secs"),
    *("--allow-http", *(f"--{service}-{what}" for service in SERVICES for what in ("port", "address"))),
)
MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_SOCKET = Path("/tmp/nvidia-mps/control")  # of the machine's own daemon, if it has one
# tritonserver's pool on a GPU of which only the stages can ask the size.
SMALL_POOL_BYTES = 1 << 30
RESTRICTED = "shared-memory,trace,logging"
RESTRICTING = ("--http-restricted-api", "--grpc-restricted-protocol")


@dataclass(frozen=True)
class ServerOptions:
    """Settings of one server. A port of 0 means: pick a free one. Raises ConfigError for what cannot work."""

    model_repository: Path
    name: str = ""
    """What tells it from the others, where there are several ("gpu1"): in messages and in its log's name."""
    checkpoint: Path | None = None
    host: str = "127.0.0.1"
    http_port: int = setting(8000, name="--http-port", least=0, most=65535)
    grpc_port: int = setting(8001, name="--grpc-port", least=0, most=65535)
    metrics_port: int = setting(8002, name="--metrics-port", least=0, most=65535)
    model_config_name: str | None = None
    ready_timeout_s: float = 300.0
    exit_timeout_s: int = 5
    """How long tritonserver waits for open connections and requests in flight when told to stop."""
    log_path: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """The stages' settings by name ("language_model.max_sequences", "device"), as `--set` takes them."""
    only: tuple[str, ...] = ()
    """The models to load; empty for all."""
    mps: bool = True
    """Let the stages use the GPU at the same time, by a CUDA MPS daemon of this server's own, where there is MPS."""
    environment: Mapping[str, str] = field(default_factory=dict)
    extra_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for flag in self.extra_flags:
            if (name := flag.partition("=")[0]) in RESERVED_FLAGS:
                raise ConfigError(
                    f"{name} cannot be passed on to tritonserver: the launcher sets it (see tessera serve --help)"
                )
        if self.checkpoint is not None and not self.checkpoint.is_dir():
            raise ConfigError(f"--checkpoint: no folder {self.checkpoint}")
        check(self, "tessera serve")

    def set_up(self) -> ServerSetup:
        """The settings as they are in force. Raises ConfigError."""
        environment = {**os.environ, **self.environment}
        checkpoint = {} if self.checkpoint is None else {"checkpoint": str(self.checkpoint.resolve())}
        given = {**self.settings, **checkpoint}
        return set_up(self.model_repository, self.model_config_name, environment, given, self.only)

    @property
    def ports(self) -> dict[str, int]:
        """Of each service; 0 for a free one."""
        return {service: getattr(self, f"{service}_port") for service in SERVICES}

    def with_ports(self, ports: Mapping[str, int]) -> ServerOptions:
        own: dict[str, Any] = {f"{service}_port": port for service, port in ports.items()}
        return replace(self, **own)

    def local(self, port: int) -> str:
        """The address of that port for a client on this machine."""
        return local_address(self.host, port)


def guard_job(options: ServerOptions, setup: ServerSetup, shm_prefix: str, grace_s: float) -> dict[str, Any]:
    """What the guard is told to run. Raises InstallationError."""
    # Links in folders that go with the server, however that ends.
    runtime, models = (SHARED_MEMORY / f"{shm_prefix}{name}" for name in ("runtime", "models"))
    installation = find_installation(runtime)
    repository = lay_out(options.model_repository, options.model_config_name, setup, models)
    environment = server_environment(options, installation, setup)
    flags = server_flags(options, installation, shm_prefix, setup, repository)
    return {
        "command": [str(installation.root / "bin" / "tritonserver"), *flags],
        "environment": environment,
        "mps_control": mps_control(options, environment, setup.device),
        # The stubs have the server's folder on sys.path: so model.py finds this package, installed or not.
        "folder": str(Path(tessera.__file__).resolve().parent.parent),
        "shm_prefix": shm_prefix,
        "grace_s": grace_s,
    }


def mps_control(options: ServerOptions, environment: Mapping[str, str], device: str) -> str | None:
    """The program to start as this server's MPS daemon; None without a GPU, without MPS, or if it is not wanted.

    Where somebody else runs a daemon, CUDA uses that one. A part of a GPU (MIG) would need a daemon that is told of it.
    """
    elsewhere = "CUDA_MPS_PIPE_DIRECTORY" in environment or MPS_SOCKET.exists()
    part = any("MIG-" in environment.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"))
    if not options.mps or elsewhere or part or device == "cpu":
        return None
    return shutil.which(MPS_CONTROL, path=environment.get("PATH"))


def server_flags(
    options: ServerOptions, installation: Installation, shm_prefix: str, setup: ServerSetup, repository: Path
) -> list[str]:
    """The command line of tritonserver after the program's name."""
    memory, _ = regions(setup.processes)
    flags = [
        f"--model-repository={repository.resolve()}",
        # Auto-complete imports every model.py twice; our configurations are complete.
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={options.exit_timeout_s}",
        *(f"--{service}-address={options.host}" for service in SERVICES),
        *(f"--{service}-port={port}" for service, port in options.ports.items()),
        # Another server that uses our vision stage (its vision_url) pings every 20 s to know whether we are there.
        "--grpc-keepalive-permit-without-calls=true",
        "--grpc-http2-min-recv-ping-interval-without-data=10000",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        f"--backend-config=python,shm-default-byte-size={memory.start}",
        f"--backend-config=python,shm-growth-byte-size={memory.growth}",
    ]
    flags += closed_doors(options.extra_flags)
    folders = {"--backend-directory": installation.root / "backends", "--cache-directory": installation.root / "caches"}
    flags += [f"{name}={folder}" for name, folder in folders.items() if folder.is_dir()]
    if setup.device == "cuda":
        pool = setup.division.server if setup.division else SMALL_POOL_BYTES
        flags.append(f"--cuda-memory-pool-byte-size=0:{pool}")
    else:
        flags += ["--pinned-memory-pool-byte-size=0", "--allow-gpu-metrics=false"]
    if options.model_config_name:
        flags.append(f"--model-config-name={options.model_config_name}")
    return flags + list(options.extra_flags)


def closed_doors(extra_flags: tuple[str, ...]) -> list[str]:
    """Flags that keep clients out of the server's administration.

    In explicit model control any client may load a model of its own making, that is, run code here; so models are all
    loaded at the start and stay. Shared-memory endpoints reach the stubs' own regions, the trace and logging ones
    change the server: they ask for a key that nobody has. Flags of the user's own on a subject are left to stand.
    """
    own = {flag.partition("=")[0] for flag in extra_flags}
    closed = {"--model-control-mode": "none"}
    closed |= {name: f"{RESTRICTED}:tessera-admin={secrets.token_hex(16)}" for name in RESTRICTING}
    return [f"{name}={value}" for name, value in closed.items() if name not in own]


def server_environment(options: ServerOptions, installation: Installation, setup: ServerSetup) -> dict[str, str]:
    """The environment of tritonserver and its stubs: ours, with the settings and with the interpreter first in PATH."""
    environment = {**os.environ, **options.environment, **setup.environment}
    environment.pop(INSTANCES, None)  # the launcher's own
    # Left alone, glibc keeps up to eight heaps a core, each with gaps of its own, so that a process of many threads
    # creeps up by what its requests leave behind: what one thread allocates, another sends and frees.
    environment.setdefault("MALLOC_ARENA_MAX", str(max(2, os.cpu_count() or 1)))
    # The fronts reach the ensemble as clients of this same server.
    environment["TESSERA_GRPC_ADDRESS"] = options.local(options.grpc_port)
    # The stub takes the environment of the python3 that it finds first.
    first = {"PATH": (Path(sys.executable).parent,), "LD_LIBRARY_PATH": installation.library_path}
    for name, folders in first.items():
        parts = [*map(str, folders), environment.get(name, "")]
        if value := os.pathsep.join(filter(None, parts)):
            environment[name] = value
    return environment


def one_per_gpu(options: ServerOptions, gpus: Sequence[str]) -> list[ServerOptions]:
    """The options of one server for each GPU, which sees no other.

    The first has the ports asked for, each next one those plus 10 (and where 0 was asked for, free ones). Raises
    ConfigError for a port that is taken, by another of these servers too.
    """
    each = []
    with ExitStack() as held:
        for number, gpu in enumerate(gpus):
            environment = {**options.environment, "CUDA_VISIBLE_DEVICES": gpu}
            own = replace(options, name=f"gpu{gpu}", environment=environment)
            own = own.with_ports({name: port and port + APART * number for name, port in options.ports.items()})
            each.append(hold_ports(own, held))
    return each


def hold_ports(options: ServerOptions, held: ExitStack) -> ServerOptions:
    """With the ports as asked, or free ones for 0; no other process can have them until ``held`` is closed.

    Raises ConfigError for one that is taken.
    """
    ports = {}
    for service, asked in options.ports.items():
        flag = f"--{service}-port of {options.name}" if options.name else f"--{service}-port"
        for tries_left in reversed(range(1 if asked else TRIES)):
            ports[service] = asked or random.choice(PICKED)
            try:
                held.enter_context(listen(options.host, ports[service], flag))
                break
            except ConfigError:
                if not tries_left:
                    raise
    return options.with_ports(ports)


def listen(host: str, port: int, flag: str) -> socket.socket:
    """A socket that listens there. Raises ConfigError, which names the flag by which the user asked for it."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen()  # the port of a connection that just closed may be taken again, a listener's not
    except OSError as error:
        bound.close()
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror} (--host, {flag})") from error
        raise ConfigError(
            f"port {port} on {host} is already in use ({flag}): stop what listens there, or choose another port (0 "
            "picks a free one)"
        ) from error
    return bound
