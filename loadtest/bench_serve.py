"""`make bench-serve`: a standard workload through the running ensemble, pictures in and answers out over gRPC.

Starts the real server (one for each of `--gpus`), and keeps the workload's number of requests under way from several
processes. What counts is the time between the end of the warm-up and the moment when the first caller runs out of
work, so that neither filling nor draining is measured. Beside each figure stand the share of steps that ran as CUDA
graphs, the requests whose embeddings came over the CPU (must be 0), the most that rows of pictures took of the engine's
pool, and the share of time for which the engine's thread waited while it planned and launched (`held_up`).

    python loadtest/bench_serve.py --workloads W1 W4a --checkpoint loadtest/shapes/internvl3-8b-shape --gpus 0
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import figures
from workloads import PROMPT, WORKLOADS, Pictures, Workload

from tessera.launcher.options import ServerOptions
from tessera.launcher.ports import one_per_gpu
from tessera.launcher.process import Server
from tessera_client import Client

sys.path.insert(0, str(figures.ROOT / "build"))
PATIENCE_S = 500.0
COUNTED = (
    "tessera_steps_total",
    "tessera_graph_steps_total",
    "tessera_embeddings_on_cpu_total",
    "tessera_engine_held_up_seconds_total",
    "tessera_prompts_total",
    "tessera_prefill_steps_total",
    "tessera_embedding_bytes_peak",
)


@dataclass(frozen=True)
class Answered:
    """When a request ended and when its first token came, in seconds of time.monotonic; ``pieces`` that were sent."""

    started: float
    first: float
    ended: float
    pieces: int


@dataclass(frozen=True)
class Load:
    """One process's part of a workload."""

    addresses: list[str]
    workload: Workload
    concurrency: int
    requests: int
    seed: int

    def run(self, start: Any, answered: Any) -> None:
        """Makes the pictures, waits for the others, then keeps ``concurrency`` requests under way."""
        pictures = Pictures(self.workload, self.seed, stock=self.requests)
        with Client(self.addresses, timeout=PATIENCE_S) as client, ThreadPoolExecutor(self.concurrency) as pool:
            start.wait(PATIENCE_S)
            answered.put(list(pool.map(lambda _: self._ask(client, pictures.deal()), range(self.requests))))

    def _ask(self, client: Client, picture: bytes) -> Answered:
        started = time.monotonic()
        if not self.workload.streamed:
            client.ask(picture, PROMPT, **self.workload.sampling)
            ended = time.monotonic()
            return Answered(started, ended, ended, 1)
        first, pieces = 0.0, 0
        with client.stream(picture, PROMPT, **self.workload.sampling) as stream:
            for _ in stream:
                first = first or time.monotonic()
                pieces += 1
        return Answered(started, first, time.monotonic(), pieces)


def measure(addresses: list[str], workload: Workload, processes: int) -> tuple[list[Answered], float]:
    """The workload's answers, in the order of their ends, without those of the warm-up and of the last round.

    Beside them the seconds from the first request to the last answer, the others' included.
    """
    context = multiprocessing.get_context("spawn")
    start, answered = context.Barrier(processes + 1), context.Queue()
    share = -(-workload.concurrency // processes)
    each = -(-(workload.warm_up + workload.requests + workload.concurrency) // processes)
    seed = time.time_ns() % 2**32
    loads = [Load(addresses, workload, share, each, seed + number) for number in range(processes)]
    running = [context.Process(target=load.run, args=(start, answered), daemon=True) for load in loads]
    for process in running:
        process.start()
    start.wait(PATIENCE_S)
    began = time.monotonic()
    ended = [answer for _ in running for answer in answered.get(timeout=PATIENCE_S)]
    lasted = time.monotonic() - began
    for process in running:
        process.join()
    ended.sort(key=lambda answer: answer.ended)
    return ended[workload.warm_up : len(ended) - workload.concurrency], lasted


def report(workload: Workload, answers: list[Answered], label: str, **notes: Any) -> None:
    seconds = answers[-1].ended - answers[0].ended
    rate = (len(answers) - 1) / seconds
    notes |= {"requests": len(answers), "concurrency": workload.concurrency, **latencies(answers)}
    name = f"serve.{workload.name}.{label}"
    command = f"make bench-serve W={workload.name}"
    if not workload.streamed:
        figures.emit(f"{name}.req_s", round(rate, 2), "req/s", command, qpm=round(60 * rate), **notes)
        return
    first = median(answer.first - answer.started for answer in answers)
    sends = sum(answer.pieces for answer in answers) / seconds
    figures.emit(f"{name}.tok_s", round(rate * workload.tokens, 1), "tok/s", command, **notes)
    figures.emit(f"{name}.ttft_p50_ms", round(1e3 * first, 1), "ms", command, **notes)
    figures.emit(f"{name}.sends_s", round(sends, 1), "responses/s", command, **notes)


def latencies(answers: list[Answered]) -> dict[str, float]:
    """p50_ms and p99_ms of whole requests."""
    spent = sorted(answer.ended - answer.started for answer in answers)
    return {"p50_ms": round(1e3 * median(spent), 1), "p99_ms": round(1e3 * spent[int(0.99 * len(spent))], 1)}


def counters(url: str) -> dict[str, float]:
    """What the language model counted so far."""
    with urllib.request.urlopen(url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    found = {line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}
    return {name: found.get(name, 0.0) for name in COUNTED}


def gpu_settings(checkpoint: Path, weights: str) -> dict[str, str]:
    """Both models of a checkpoint on the GPU, for :func:`render_repository.render`."""
    from render_repository import GPU_SETTINGS

    stages = ("preprocess", "vision_encoder", "language_model")
    checkpoints = {f"{stage}.checkpoint": str(checkpoint) for stage in stages}
    return {**GPU_SETTINGS, **checkpoints, **{f"{stage}.weights": weights for stage in stages[1:]}}


@contextmanager
def running(
    settings: dict[str, str], instances: dict[str, int], gpus: list[str], log: Path | None = None, mps: bool = True
) -> Iterator[list[Server]]:
    """Servers of the model repository with these parameters and instance counts, one for each GPU or one without.

    ``log``: where the server's log stays; without it it goes with the server.
    """
    import render_repository

    with tempfile.TemporaryDirectory(prefix="tessera-serve-") as folder, ExitStack() as stack:
        repository = Path(folder) / "model_repository"
        render_repository.render(figures.ROOT / "model_repository", repository, instances, settings)
        options = ServerOptions(
            model_repository=repository,
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            mps=mps,
            log_path=log or Path(folder) / "server.log",
        )
        each = one_per_gpu(options, gpus) if gpus else [options]
        with ThreadPoolExecutor(len(each)) as pool:  # servers start side by side
            yield list(pool.map(lambda own: stack.enter_context(Server(own)), each))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["W1"], choices=sorted(WORKLOADS))
    parser.add_argument("--gpus", default="0", help="numbers with commas between; empty for the CPU's settings")
    parser.add_argument("--checkpoint", type=Path, default=figures.ROOT / "build" / "default_model" / "checkpoint")
    parser.add_argument("--weights", choices=("checkpoint", "random"), default="checkpoint")
    parser.add_argument("--instances", nargs="*", default=[], metavar="MODEL=N")
    parser.add_argument("--set", nargs="*", default=[], metavar="MODEL.PARAMETER=VALUE", dest="parameters")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep the server's log")
    parser.add_argument("--no-mps", action="store_true", help="stages take turns on the GPU, for comparison")
    parser.add_argument("--processes", type=int, default=6, help="of the load generator")
    parser.add_argument("--concurrency", type=int, help="instead of the workload's own, for a trial")
    parser.add_argument("--label", default="bf16", help="stands in the figures' names")
    arguments = parser.parse_args()
    gpus = arguments.gpus.split(",") if arguments.gpus else []
    label = arguments.label + (f".{len(gpus)}gpus" if len(gpus) > 1 else "") + ".no_mps" * arguments.no_mps
    checkpoint = arguments.checkpoint.resolve()
    settings = gpu_settings(checkpoint, arguments.weights) if gpus else {}
    settings |= dict(pair.split("=", 1) for pair in arguments.parameters)
    instances = {model: int(count) for model, count in (pair.split("=", 1) for pair in arguments.instances)}
    with running(settings, instances, gpus, arguments.log, not arguments.no_mps) as servers:
        addresses = [server.grpc_url for server in servers]
        for name in arguments.workloads:
            workload = WORKLOADS[name]
            if arguments.concurrency:
                workload = replace(workload, concurrency=arguments.concurrency)
            before = [counters(server.metrics_url) for server in servers]
            answers, lasted = measure(addresses, workload, min(arguments.processes, workload.concurrency))
            after = [counters(server.metrics_url) for server in servers]
            grown = {name: sum(now[name] - then[name] for now, then in zip(after, before)) for name in COUNTED}
            report(
                workload,
                answers,
                label,
                gpus=len(gpus),
                settings=sorted(arguments.parameters),
                mps=all(server.mps for server in servers),
                embeddings_on_cpu=int(grown["tessera_embeddings_on_cpu_total"]),
                graph_steps=round(grown["tessera_graph_steps_total"] / max(1.0, grown["tessera_steps_total"]), 3),
                held_up=round(grown["tessera_engine_held_up_seconds_total"] / lasted / len(servers), 4),
                embedding_mib_peak=round(max(now["tessera_embedding_bytes_peak"] for now in after) / 2**20, 1),
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
