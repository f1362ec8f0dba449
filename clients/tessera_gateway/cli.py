"""``tessera gateway``: the HTTP door to servers that run already. `tessera serve` starts this module as its child."""

import argparse
import contextlib
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from uvicorn.supervisors import Multiprocess

from tessera_client.retry import LONGEST
from tessera_gateway import tracing
from tessera_gateway.app import worker_app
from tessera_gateway.batches.database import Database, FolderLock
from tessera_gateway.connections import Connection, raise_file_limit
from tessera_gateway.keys import read_keys
from tessera_gateway.settings import LONGEST_DRAIN_S, Settings, add_options, names
from tessera_wire.command_line import Parser
from tessera_wire.errors import InvalidRequest
from tessera_wire.tensors import addresses, local_address, parse_url

STOP_SECONDS = 3  # after the drain, until uvicorn cancels what is left
QUIET_SECONDS = 75  # of a connection kept; longer than clients keep theirs, or one would ask on a line just closed
STALLED_MS = 60_000  # a client that takes nothing for so long has gone: its connection ends, and with it its request


def gateway_main(argv: Sequence[str] | None = None) -> int:
    """Runs the gateway until SIGTERM or Ctrl-C. Returns 0, or 1 when it cannot start (2: wrong usage)."""
    options = _parser().parse_args(argv)
    try:
        settings = _settings(options)
        if options.check:
            return 0
        listener = _listen(options.host, options.port)
    except (InvalidRequest, ValueError, OverflowError, OSError) as error:
        print(f"tessera gateway: {error}", file=sys.stderr)
        return 1
    address = f"http://{local_address(options.host, listener.getsockname()[1])}"
    if options.with_parent:
        threading.Thread(target=_end_with_standard_input, daemon=True).start()
    threading.Thread(target=_say_ready, args=(address,), daemon=True).start()
    if settings.workers == 1:  # which counts in its own memory: uvicorn ends by the signal, and a folder would stay
        return _run(settings, listener)
    with tempfile.TemporaryDirectory(prefix="tessera-gateway-") as folder:
        return _run(replace(settings, counters=Path(folder) / "counters"), listener)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tessera gateway",
        description="An HTTP server that OpenAI's clients can ask, in front of one or several Tessera servers.",
    )
    default, add = Settings(), parser.add_argument
    add("--url", default=os.environ.get("TESSERA_URL", default.url), help="gRPC addresses of the servers, with commas "
        "between (default: $TESSERA_URL or %(default)s)")  # fmt: skip
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s: this machine only)")
    add("--port", type=int, default=9000, metavar="N", help="default %(default)s; 0 picks a free one")
    add("--metrics", type=names, default=(), metavar="URL,...",
        help="the servers' metrics pages (default: at the port above each gRPC port)")  # fmt: skip
    add("--with-parent", action="store_true", help="end when standard input does")
    add("--check", action="store_true", help="say whether the gateway could start with these options, and end")
    add_options(add)
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    """Raises InvalidRequest, ValueError or OSError for what cannot work."""
    for each in addresses(options.url):
        parse_url(each)
    given: dict[str, Any] = {"allowed_hosts": _allowed_hosts(options)}
    for field in fields(Settings):
        value = getattr(options, field.name, None)
        if field.metadata.get("above_0") and isinstance(value, (int, float)) and not 0 < value <= LONGEST:
            raise ValueError(f"{field.metadata['flag']} must be above 0, and at most {LONGEST:g}")
        if field.name in options:
            given.setdefault(field.name, value)
    if not 0 <= options.drain_s <= LONGEST_DRAIN_S:
        raise ValueError(f"--drain must be between 0 and {LONGEST_DRAIN_S:g}")
    if options.otel is not None:  # the workers inherit it
        os.environ[tracing.ENDPOINT] = f"{options.otel.rstrip('/')}/v1/traces"
    tracing.wanted(os.environ)
    if options.keys is not None:
        read_keys(options.keys)
    if options.batch_folder is not None:
        Database(options.batch_folder).close()  # made before several workers would do so at once
        with contextlib.closing(FolderLock(options.batch_folder)) as lock:
            lock.take()
    return Settings(**given)


def _allowed_hosts(options: argparse.Namespace) -> tuple[str, ...] | None:
    local = options.host in ("localhost", "::1") or options.host.startswith("127.")
    if options.allowed_hosts is None:
        return () if local else None
    return (*options.allowed_hosts, options.host)


def _listen(host: str, port: int) -> socket.socket:
    """The socket that all workers share."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux has it, and hands it on to the connections
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
    try:
        listener.bind((host, port))
        listener.listen()  # so that a second gateway on this port is refused
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror} (--host, --port)") from error
    listener.set_inheritable(True)
    return listener


def _run(settings: Settings, listener: socket.socket) -> int:
    raise_file_limit()
    config = server_config(settings)
    if settings.workers > 1:
        Workers(config, [listener]).run()
        return 0
    server = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):
        server.run([listener])
    return 0 if server.started else 1


class Workers(Multiprocess):
    """uvicorn's, which keeps the port until the last of them has ended; where no process would answer."""

    def terminate_all(self) -> None:
        for listener in self.sockets:
            listener.close()
        super().terminate_all()


def server_config(settings: Settings) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        partial(worker_app, settings),
        factory=True,
        workers=settings.workers,
        http=Connection,
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=math.ceil(settings.drain_s) + STOP_SECONDS,
        timeout_keep_alive=QUIET_SECONDS,
    )


def _say_ready(address: str) -> None:
    """One line once a worker answers, whatever it says of the servers behind it."""
    while True:
        try:
            httpx.get(f"{address}/version", timeout=10.0, trust_env=False)  # which asks no server
        except httpx.HTTPError:
            time.sleep(0.05)
            continue
        print(f"tessera gateway: ready: {address}", flush=True)
        return


def _end_with_standard_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    raise SystemExit(gateway_main())
