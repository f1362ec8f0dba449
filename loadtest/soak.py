"""`make soak`: half an hour of mixed load on the CPU ensemble. Does memory stay flat, is every request answered?

Starts a server through the launcher and keeps a few requests under way: short and long answers, one, two and no
pictures, streams that are left early, clients that vanish without a word, requests that must be refused; over gRPC,
HTTP, the fronts and a gateway. All pictures are distinct. Meanwhile it looks at every process of the server and of the
gateway and at the shared memory. The first third is warm-up (caches fill); after it, the mean of the last quarter may
exceed that of the first by 5% at most. And each request the language model took in must have ended exactly once, by its
own count and by ours.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import figures
import psutil
from measuring import counted
from serving import gateway
from soak_traffic import Traffic

from tessera.launcher.guard import descendants
from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server

ALLOWED_PCT = 5.0
ALLOWED_DESCRIPTORS = 16
DRAIN_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
GATEWAY_WORKERS = 2


class Watch:
    """What the processes of the server and of the gateway, and the server's shared memory, have at each look."""

    def __init__(self, server: Server, gateway: int) -> None:
        self._server = server
        self._processes = {server.pid: "tritonserver", gateway: "gateway"}
        self._processes |= {pid: name for name, pid in server.stub_pids().items()}
        for number, pid in enumerate(sorted(descendants(gateway)), 1):  # its workers, and what counts for them
            self._processes[pid] = f"gateway's {number}"
        self.rss, self.descriptors = ({name: list[float]() for name in self._processes.values()} for _ in range(2))
        """By process: bytes, open files."""
        self.shared: list[float] = []
        """Bytes of this server's files in /dev/shm."""

    def look(self) -> str:
        """Why there is no more to see, for a process is gone; mostly empty."""
        try:
            for pid, name in self._processes.items():
                process = psutil.Process(pid)
                self.rss[name].append(process.memory_info().rss)
                self.descriptors[name].append(process.num_fds())
            files = SHARED_MEMORY.glob(f"{self._server.shm_prefix}*")
            self.shared.append(sum(file.stat().st_blocks * 512 for file in files))
        except (OSError, psutil.Error) as error:
            return self._server.failure() or f"a process could not be looked at: {error}"
        return ""


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last quarter of what follows the warm-up (the first third)."""
    settled = values[len(values) // 3 :]
    quarter = len(settled) // 4
    if quarter == 0:
        raise ValueError(f"{len(values)} samples are too few: make the run longer or --interval shorter")
    return fmean(settled[:quarter]), fmean(settled[-quarter:])


def growth_pct(values: Sequence[float]) -> float:
    """How much the last quarter exceeds the first, in percent; negative where it shrank."""
    first, last = ends(values)
    return 100.0 * (last - first) / first if first else 0.0


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The values as a line of bars between their least and their greatest."""
    bars = "▁▂▃▄▅▆▇█"
    width = min(width, len(values))
    means = [fmean(values[len(values) * i // width : len(values) * (i + 1) // width]) for i in range(width)]
    low, high = min(means), max(means)
    return "".join(bars[int((value - low) / (high - low) * (len(bars) - 1)) if high > low else 0] for value in means)


def drain(server: Server, accepted: int) -> tuple[int, int]:
    """(requests that ended in the language model, requests still in it), by the metrics page: when nothing is under way
    and all of ours have ended, or after a minute."""
    deadline = time.monotonic() + DRAIN_S
    while True:
        values = counted(server.metrics_url)
        books = int(values["tessera_requests_total"]), int(values["tessera_requests_in_flight"])
        if books == (accepted, 0) or time.monotonic() > deadline:
            return books
        time.sleep(1.0)


def row(name: str, values: Sequence[float], rest: str = "") -> str:
    """One line of the report; ``values`` in bytes."""
    first, last = ends(values)
    numbers = f"{first / 1e6:11.1f} MB{last / 1e6:9.1f} MB{growth_pct(values):+8.2f}%"
    return f"{name:18}{numbers}{rest:11}   {sparkline(values)}"


def report(watch: Watch) -> list[str]:
    """Prints what was seen; returns what was not flat."""
    faults = []
    print(f"{'':18}{'after warm-up':>14}{'at the end':>12}{'growth':>9}{'files':>11}   MB over the run")
    for name, values in watch.rss.items():
        before, after = ends(watch.descriptors[name])
        print(row(name, values, f"{before:5.0f}>{after:<5.0f}"))
        if (growth := growth_pct(values)) > ALLOWED_PCT:
            faults.append(f"the memory of {name} grew by {growth:.2f}%")
        if after - before > ALLOWED_DESCRIPTORS:
            faults.append(f"the open files of {name} grew from {before:.0f} to {after:.0f}")
    print(row("shared memory", watch.shared))
    if (growth := growth_pct(watch.shared)) > ALLOWED_PCT:
        faults.append(f"shared memory grew by {growth:.2f}%")
    return faults


def soak(server: Server, traffic: Traffic, watch: Watch, options: argparse.Namespace) -> list[str]:
    """Runs the load for its time, then lets it drain. Returns what is wrong with the server and the books."""
    started, lost, said = time.monotonic(), "", 0.0
    traffic.start(options.concurrency)
    while (minutes := (time.monotonic() - started) / 60) < options.minutes and not lost:
        time.sleep(options.interval)
        if lost := watch.look():
            print(f"soak: {lost}", file=sys.stderr, flush=True)
        if minutes > said + 1:
            said = minutes
            print(f"{minutes:.0f} min: ended {dict(traffic.ended)}", file=sys.stderr, flush=True)
    traffic.stop()
    faults = [lost] if lost else []
    try:
        ended, in_flight = drain(server, traffic.accepted)
        if (ended, in_flight) != (traffic.accepted, 0):
            books = f"the language model ended {ended} requests and holds {in_flight}"
            faults.append(f"{books}, but {traffic.accepted} were answered or left")
    except OSError as error:
        faults.append(f"the metrics page is gone: {error}")
    if (failure := server.failure()) and failure not in faults:
        faults.append(failure)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--interval", type=float, default=3.0, help="seconds between two looks at the processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, help="default: the default model")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="the server's environment, for short trials"
    )
    arguments = parser.parse_args()
    options = ServerOptions(
        figures.ROOT / "model_repository",
        checkpoint=arguments.checkpoint,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        environment=dict(entry.split("=", 1) for entry in arguments.set),
    )
    started = time.monotonic()
    with Server(options) as server, gateway([server.grpc_url], GATEWAY_WORKERS) as (address, pid):
        traffic, watch = Traffic(server, address, arguments.seed), Watch(server, pid)
        faults = soak(server, traffic, watch, arguments)
    minutes = (time.monotonic() - started) / 60
    faults += report(watch)
    faults += [f"{count} x {fault}" for fault, count in traffic.faults.most_common(10)]
    if traffic.unanswered > sum(traffic.faults.values()):
        faults.append(f"{traffic.unanswered - sum(traffic.faults.values())} requests never ended")
    print(f"{traffic.requests} requests sent: {dict(traffic.sent)}; ended: {dict(traffic.ended)}")
    notes = {"concurrency": arguments.concurrency, "settings": arguments.set}
    growth = max(growth_pct(values) for values in watch.rss.values())
    for name, value, unit, bound in (
        ("minutes", round(minutes, 1), "min", None),
        ("requests", traffic.requests, "requests", None),
        ("unanswered", traffic.unanswered, "requests", 0),
        ("rss_growth_pct", round(growth, 2), "%", ALLOWED_PCT),
        ("shm_growth_pct", round(growth_pct(watch.shared), 2), "%", ALLOWED_PCT),
    ):
        command = f'make soak ARGS="--minutes {arguments.minutes:g}"'
        figures.emit(f"soak.{name}", value, unit, command, bound, **notes)
    for fault in faults:
        print(f"soak: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
