"""The three ports of each server: asked for, derived, or picked."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from tessera.errors import ConfigError
from tessera.launcher.options import ServerOptions

FLAGS = ("--http-port", "--grpc-port", "--metrics-port")
APART = 10
# Where free ports are picked: below those that Linux gives to outgoing connections, one of which could otherwise take
# a picked port before tritonserver has it.
PICKED = (20_000, 32_768)
TRIES = 20


def choose_ports(options: ServerOptions) -> tuple[int, int, int]:
    """(HTTP, gRPC, metrics): as asked, or free ones for 0. Raises ConfigError for one that is taken."""
    with ExitStack() as held:
        return hold_ports(options, held)


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
            own = with_ports(own, [port and port + APART * number for port in ports_of(options)])
            each.append(with_ports(own, hold_ports(own, held)))
    return each


def ports_of(options: ServerOptions) -> tuple[int, int, int]:
    """(HTTP, gRPC, metrics), 0 for free ones."""
    return options.http_port, options.grpc_port, options.metrics_port


def with_ports(options: ServerOptions, ports: Sequence[int]) -> ServerOptions:
    """The same with these (HTTP, gRPC, metrics)."""
    http, grpc, metrics = ports
    return replace(options, http_port=http, grpc_port=grpc, metrics_port=metrics)


def hold_ports(options: ServerOptions, held: ExitStack) -> tuple[int, int, int]:
    """As :func:`choose_ports`; nobody else can have them until ``held`` is closed."""
    http, grpc, metrics = (
        _hold(options, flag, port, held) if port else _hold_a_free_one(options, flag, held)
        for flag, port in zip(FLAGS, ports_of(options), strict=True)
    )
    return http, grpc, metrics


def _hold_a_free_one(options: ServerOptions, flag: str, held: ExitStack) -> int:
    for _ in range(TRIES):
        try:
            return _hold(options, flag, random.randrange(*PICKED), held)
        except ConfigError as error:
            taken = error
    raise taken


def _hold(options: ServerOptions, flag: str, port: int, held: ExitStack) -> int:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    bound = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((options.host, port))
        bound.listen()  # the port of a connection that just closed may be taken again, a listener's not
    except OSError as error:
        whose = f" of {options.name}" if options.name else ""
        raise cannot_listen(options.host, port, flag + whose, error) from error
    return port


def cannot_listen(host: str, port: int, flag: str, error: OSError) -> ConfigError:
    """The refusal of a port that the user asked for."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is already in use ({flag}): stop what listens there, or choose another port (0 "
            "picks a free one)"
        )
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror} (--host, {flag})")
