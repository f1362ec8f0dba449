"""`make bench-remote-vision`: what Nagle's algorithm does to small messages, and what a remote vision stage costs.

1. Request and reply over loopback TCP, each a header and a body written apart as RPC libraries do, with TCP_NODELAY on
   and off and nothing else changed. With Nagle's algorithm the body waits until the header is acknowledged, and the
   other side delays that by up to 40 ms because it has nothing to send.
2. The vision stage of one server asked directly, and through a second server whose `vision_url` names the first, both
   on this machine: pictures computed anew, and one that the first has in its cache, where only the way is left.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import figures
import numpy as np
import tritonclient.grpc as grpcclient

from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server

sys.path.insert(0, str(figures.ROOT / "build"))
COMMAND = "make bench-remote-vision"
HEADER = struct.Struct("!I")  # the body's length
SIDE = 448


def write(connection: socket.socket, body: bytes) -> None:
    """A message: two writes, as a library does that frames its caller's bytes."""
    connection.sendall(HEADER.pack(len(body)))
    connection.sendall(body)


def read(connection: socket.socket) -> bytes:
    """A whole message; empty at the connection's end."""
    header = _exactly(connection, HEADER.size)
    return _exactly(connection, HEADER.unpack(header)[0]) if header else b""


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            return b""
        parts += part
    return parts


@contextmanager
def echo(no_delay: bool) -> Iterator[socket.socket]:
    """A connection to a thread that sends every message back; the option is set, or not, on both ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, no_delay)

    def answer() -> None:
        with far:
            while body := read(far):
                write(far, body)

    thread = threading.Thread(target=answer)
    thread.start()
    with near:
        yield near
        near.shutdown(socket.SHUT_WR)
        thread.join()


def round_trips(no_delay: bool, messages: int, size: int) -> list[float]:
    """Seconds of each round trip of a body of ``size`` bytes."""
    body, spent = bytes(size), []
    with echo(no_delay) as connection:
        for _ in range(messages):
            began = time.perf_counter()
            write(connection, body)
            if read(connection) != body:
                raise RuntimeError("the echo is not what was sent")
            spent.append(time.perf_counter() - began)
    return spent


def report(name: str, spent: list[float], per_second: float, unit: str, **notes: object) -> None:
    ordered = sorted(spent)
    p50, p99 = 1e3 * median(ordered), 1e3 * ordered[int(0.99 * len(ordered))]
    figures.emit(f"{name}.{unit.partition('/')[0]}_s", round(per_second, 2), unit, COMMAND, **notes)
    figures.emit(f"{name}.p50_ms", round(p50, 3), "ms", COMMAND, **notes)
    figures.emit(f"{name}.p99_ms", round(p99, 3), "ms", COMMAND, **notes)
    print(f"{name}: {per_second:9.1f} {unit}, p50 {p50:8.3f} ms, p99 {p99:8.3f} ms", file=sys.stderr)


def nagle(messages: int, size: int) -> None:
    for name, no_delay in (("on", False), ("off", True)):
        spent = round_trips(no_delay, messages, size)
        report(f"remote.nagle.{name}", spent, len(spent) / sum(spent), "messages/s", messages=messages, bytes=size)


class Asker:
    """Asks the vision stage at ``url`` for the rows of one tile; ``digests`` says whose picture it is."""

    def __init__(self, url: str, digests: Iterator[int]) -> None:
        self._client = grpcclient.InferenceServerClient(url)
        self._digests = digests
        self._pixels = np.zeros((1, SIDE * SIDE * 3), np.uint8)
        self._plan = np.array([[0, 1, SIDE, SIDE]], np.int32)

    def __call__(self, _: object = None) -> float:
        """Seconds that it took."""
        inputs = []
        digest = np.array([[next(self._digests), 1]], np.int64)
        for name, kind, values in (
            ("PIXELS", "UINT8", self._pixels),
            ("PLAN", "INT32", self._plan),
            ("DIGEST", "INT64", digest),
        ):
            inputs.append(grpcclient.InferInput(name, list(values.shape), kind))
            inputs[-1].set_data_from_numpy(values)
        began = time.perf_counter()
        self._client.infer("vision_encoder", inputs)
        return time.perf_counter() - began


def rate(ask: Callable[[object], float], requests: int, concurrency: int) -> float:
    """Requests a second with so many under way."""
    with ThreadPoolExecutor(concurrency) as pool:
        began = time.perf_counter()
        list(pool.map(ask, range(requests)))
        return requests / (time.perf_counter() - began)


@contextmanager
def vision_server(folder: Path, settings: dict[str, str]) -> Iterator[str]:
    """The gRPC address of a server that has the vision stage alone."""
    import render_repository

    parameters = {f"vision_encoder.{name}": value for name, value in settings.items()}
    render_repository.render(figures.ROOT / "model_repository", folder, {}, parameters, only=["vision_encoder"])
    options = ServerOptions(folder, http_port=0, grpc_port=0, metrics_port=0, log_path=folder.with_suffix(".log"))
    with Server(options) as server:
        yield server.grpc_url


def hop(requests: int, concurrency: int, settings: dict[str, str]) -> None:
    fresh = itertools.count(2)
    with tempfile.TemporaryDirectory(prefix="tessera-remote-") as scratch:
        folder = Path(scratch)
        with (
            vision_server(folder / "far", settings) as far,
            vision_server(folder / "near", {"vision_url": far}) as near,
        ):
            for pictures, digests in (("computed", fresh), ("cached", itertools.repeat(1))):
                for name, url in (("local", far), ("remote", near)):
                    ask = Asker(url, digests)
                    rate(ask, 2 * concurrency, concurrency)  # warm-up
                    per_second = rate(ask, requests, concurrency)
                    alone = [ask() for _ in range(requests)]
                    notes = {"requests": requests, "concurrency": concurrency, "latency_at_concurrency": 1}
                    report(f"remote.vision.{pictures}.{name}", alone, per_second, "requests/s", **notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=64, help="of a message's body")
    parser.add_argument("--requests", type=int, default=200, help="to the vision stage; 0 leaves that part out")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--set", nargs="*", default=[], metavar="PARAMETER=VALUE", dest="parameters", help="of the far")
    arguments = parser.parse_args()
    nagle(arguments.messages, arguments.bytes)
    if arguments.requests:
        settings = dict(setting.split("=", 1) for setting in arguments.parameters)
        hop(arguments.requests, arguments.concurrency, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
