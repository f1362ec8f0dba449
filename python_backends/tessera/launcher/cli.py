"""``tessera serve``: one command that runs the server until it is told to stop."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import tessera
from tessera.errors import TesseraError
from tessera.launcher.fleet import Fleet
from tessera.launcher.health import HealthPort
from tessera.launcher.options import ServerOptions
from tessera.launcher.ports import one_a_gpu
from tessera.launcher.process import Server
from tessera.launcher.supervisor import Supervision

GPU_NAME = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z-]+")


class StopRequested(BaseException):
    """SIGTERM or SIGINT arrived; not an Exception, so that no handler on the way swallows it."""


def serve_main(argv: Sequence[str] | None = None) -> int:
    """Runs ``tessera serve``. Returns 0 after a stop by signal, 1 when the server failed (2: wrong usage)."""
    options, gpus, supervision, verbose = parse(list(sys.argv[1:] if argv is None else argv))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, request_stop)
    try:
        supervision.validate()
        fleet = Fleet(one_a_gpu(options, gpus) if gpus else [options], supervision, say)
        with HealthPort(fleet.health, options.host, supervision.health_port):
            if verbose:
                for server in fleet.servers:
                    threading.Thread(target=follow_log, args=(server,), daemon=True).start()
            try:
                reason = fleet.run()
            finally:
                fleet.stop()
        say(f"stopped: {reason}", error=True)
        return 1
    except StopRequested:
        say("stopped")
        return 0
    except TesseraError as error:
        say(str(error), error=True)
        return 1


def request_stop(number: int, frame: FrameType | None) -> None:
    """Signal handler: the first signal stops the server, later ones must not cut its clean-up short."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    raise StopRequested


def parse(argv: list[str]) -> tuple[ServerOptions, tuple[str, ...], Supervision, bool]:
    """Command line -> (options, GPUs, supervision, verbose). What follows ``--`` goes to tritonserver as it is."""
    ours, passed_on = argv, []
    if "--" in argv:
        split = argv.index("--")
        ours, passed_on = argv[:split], argv[split + 1 :]
    parser = argparse.ArgumentParser(
        prog="tessera serve",
        description="Run tritonserver on a model repository until SIGTERM or Ctrl-C, and restart it when it dies.",
        epilog="Flags after -- are passed on to tritonserver. A port of 0 picks a free one.",
    )
    add = parser.add_argument
    add("--model-repository", type=Path, metavar="DIR", help="default: model_repository here or in the source tree")
    add("--checkpoint", type=Path, metavar="DIR", help="model folder, handed to the stages as TESSERA_CHECKPOINT")
    add(
        "--gpus",
        type=gpu_names,
        default=(),
        metavar="N,N,...",
        help="one server for each of these GPUs (numbers or UUIDs, as in CUDA_VISIBLE_DEVICES); each server's ports "
        "are the ones before plus 10",
    )
    add("--no-mps", action="store_true", help="start no CUDA MPS daemon: the stages take turns on the GPU")
    add("--host", default=ServerOptions.host, help="address to listen on (default %(default)s: this machine only)")
    add("--http-port", type=int, default=ServerOptions.http_port, metavar="N", help="default %(default)s")
    add("--grpc-port", type=int, default=ServerOptions.grpc_port, metavar="N", help="default %(default)s")
    add("--metrics-port", type=int, default=ServerOptions.metrics_port, metavar="N", help="default %(default)s")
    add("--health-port", type=int, default=Supervision.health_port, metavar="N", help="default %(default)s")
    add("--no-restart", action="store_true", help="end when a stage or the server dies")
    add("--max-restarts", type=int, default=Supervision.max_restarts, metavar="N", help="default %(default)s")
    add(
        "--restart-window",
        type=float,
        default=Supervision.restart_window_s,
        metavar="S",
        help="give up after more than --max-restarts within S seconds (%(default)s)",
    )
    add("--ping-interval", type=float, default=Supervision.ping_interval_s, metavar="S", help="default %(default)s")
    add(
        "--ping-timeout",
        type=float,
        default=Supervision.ping_timeout_s,
        metavar="S",
        help="a stage that does nothing for S seconds is dead (%(default)s)",
    )
    add("--model-config-name", metavar="NAME", help="use configs/NAME.pbtxt of each model that has it")
    add("--ready-timeout", type=float, default=ServerOptions.ready_timeout_s, metavar="S", help="default %(default)s")
    add("--shm-bytes", type=int, metavar="N", help="shared memory that each Python process starts with")
    add("--log", type=Path, metavar="FILE", help="the server's log (default: in the cache folder)")
    add("--log-verbose", type=int, default=0, metavar="N", help="tritonserver's verbosity")
    add("--verbose", action="store_true", help="show the server's log here as well")
    known = parser.parse_args(ours)
    options = ServerOptions(
        model_repository=known.model_repository or default_repository(),
        checkpoint=known.checkpoint,
        host=known.host,
        http_port=known.http_port,
        grpc_port=known.grpc_port,
        metrics_port=known.metrics_port,
        model_config_name=known.model_config_name,
        log_verbose=known.log_verbose,
        ready_timeout_s=known.ready_timeout,
        log_path=known.log,
        shm_bytes=known.shm_bytes,
        mps=not known.no_mps,
        extra_flags=tuple(passed_on),
    )
    supervision = Supervision(
        restart=not known.no_restart,
        max_restarts=known.max_restarts,
        restart_window_s=known.restart_window,
        ping_interval_s=known.ping_interval,
        ping_timeout_s=known.ping_timeout,
        health_port=known.health_port,
    )
    return options, known.gpus, supervision, known.verbose


def gpu_names(text: str) -> tuple[str, ...]:
    """The value of --gpus."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not GPU_NAME.fullmatch(name):
            raise argparse.ArgumentTypeError(f"{name!r} is no GPU: give numbers with commas between, such as 0,1")
        if names.count(name) > 1:
            raise argparse.ArgumentTypeError(f"GPU {name} is named twice")
    return names


def default_repository() -> Path:
    """./model_repository if it is there, else the one beside this package's source."""
    here = Path("model_repository")
    return here if here.is_dir() else Path(tessera.__file__).resolve().parents[2] / "model_repository"


def follow_log(server: Server) -> None:
    """Copies the server's log to standard error as it grows; runs in a daemon thread."""
    position, file = 0, 0
    while True:
        if server.pid and server.log_path.exists():
            with open(server.log_path, "rb") as log:
                if (number := os.fstat(log.fileno()).st_ino) != file:  # each start has a new log
                    position, file = 0, number
                log.seek(position)
                block = log.read()
            position += len(block)
            sys.stderr.write(block.decode("utf-8", "replace"))
            sys.stderr.flush()
        time.sleep(0.1)


def say(message: str, error: bool = False) -> None:
    print(f"tessera: {message}", file=sys.stderr if error else sys.stdout, flush=True)


if __name__ == "__main__":
    raise SystemExit(serve_main())
