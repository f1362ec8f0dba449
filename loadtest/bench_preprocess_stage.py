"""The preprocess stage alone in the real server (part of `make bench-preprocess`): 448x448 JPEGs a second.

Starts tritonserver with a repository that holds only `preprocess`, and keeps requests under way over gRPC from several
client processes. They ask for INPUT_IDS alone: PIXELS stay inside the server, as they do in the ensemble. Every client
goes round its own stock of distinct pictures; nothing in this stage remembers a picture. With more cores than
instances the server gets as many cores as it has instances and the clients get the others.

    bash loadtest/carried_server.sh .carry/site312.tar.xz python loadtest/bench_preprocess_stage.py --instances 8
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import figures
import numpy as np
from workloads import PROMPT, picture

from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server
from tessera.preprocess.decode import decode

sys.path.insert(0, str(figures.ROOT / "build"))
STAGE = "preprocess"
SIZE = (448, 448)
STOCK = 64
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Client:
    """One process of the load: ``concurrency`` requests under way until ``seconds`` after the start."""

    address: str
    cores: frozenset[int]
    concurrency: int
    seconds: float
    seed: int

    def run(self, start: Any, ended: Any) -> None:
        """Puts (when each answer came, in seconds of time.monotonic) into ``ended``."""
        import tritonclient.grpc as grpc

        os.sched_setaffinity(0, self.cores)
        requests = []
        for number in range(STOCK):
            jpeg = picture(*SIZE, (self.seed, number))
            image, text = grpc.InferInput("image", [1], "BYTES"), grpc.InferInput("text_input", [1], "BYTES")
            image.set_data_from_numpy(np.array([jpeg], dtype=object))
            text.set_data_from_numpy(np.array([PROMPT.encode()], dtype=object))
            requests.append([image, text])
        wanted = [grpc.InferRequestedOutput("INPUT_IDS")]
        turns = itertools.cycle(requests)
        with grpc.InferenceServerClient(self.address) as client, ThreadPoolExecutor(self.concurrency) as pool:
            start.wait(PATIENCE_S)
            until = time.monotonic() + self.seconds

            def ask() -> list[float]:
                times = []
                while time.monotonic() < until:
                    client.infer(STAGE, next(turns), outputs=wanted, client_timeout=PATIENCE_S)
                    times.append(time.monotonic())
                return times

            running = [pool.submit(ask) for _ in range(self.concurrency)]
            ended.put([moment for future in running for moment in future.result()])


def measure(clients: list[Client], warm_up: float) -> tuple[float, int]:
    """Answers a second between the warm-up's end and the clients' last second; and how many these were."""
    context = multiprocessing.get_context("spawn")
    start, ended = context.Barrier(len(clients) + 1), context.Queue()
    running = [context.Process(target=client.run, args=(start, ended), daemon=True) for client in clients]
    for process in running:
        process.start()
    start.wait(PATIENCE_S)
    began = time.monotonic()
    times = [moment for _ in running for moment in ended.get(timeout=PATIENCE_S)]
    for process in running:
        process.join()
    lasts = clients[0].seconds - warm_up
    counted = sum(warm_up <= moment - began < warm_up + lasts for moment in times)
    return counted / lasts, counted


def decodes_a_second(pictures: int = 64, rounds: int = 5) -> float:
    """By one thread that does nothing else."""
    cv2.setNumThreads(1)
    jpegs = [picture(*SIZE, (1, number)) for number in range(pictures)]
    taken = []
    for jpeg in jpegs * rounds:
        started = time.perf_counter()
        decode(jpeg)
        taken.append(time.perf_counter() - started)
    return 1 / statistics.median(taken)


def shares(instances: int) -> tuple[set[int], set[int]]:
    """Cores of the server and of the clients; all cores for both where there are not more than instances."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= instances:
        return set(cores), set(cores)
    return set(cores[:instances]), set(cores[instances:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--clients", type=int, default=4, help="processes of the load")
    parser.add_argument("--concurrency", type=int, default=0, help="requests under way; 4 an instance by default")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--set", nargs="*", default=[], metavar="PARAMETER=VALUE", dest="parameters")
    arguments = parser.parse_args()
    import render_repository

    own, others = shares(arguments.instances)
    concurrency = arguments.concurrency or 4 * arguments.instances
    ceiling = arguments.instances * decodes_a_second()
    with tempfile.TemporaryDirectory(prefix="tessera-stage-") as folder:
        repository = Path(folder) / "model_repository"
        settings = {f"{STAGE}.{name}": value for name, value in (pair.split("=", 1) for pair in arguments.parameters)}
        render_repository.render(figures.ROOT / "model_repository", repository, {STAGE: arguments.instances}, settings)
        for model in repository.iterdir():
            if model.name != STAGE:
                shutil.rmtree(model)
        options = ServerOptions(
            repository, http_port=0, grpc_port=0, metrics_port=0, log_path=Path(folder) / "server.log"
        )
        os.sched_setaffinity(0, own)  # the server inherits it
        with Server(options) as server:
            os.sched_setaffinity(0, others)
            warm_up = arguments.seconds / 4
            share = -(-concurrency // arguments.clients)
            load = [
                Client(server.grpc_url, frozenset(others), share, arguments.seconds, seed)
                for seed in range(arguments.clients)
            ]
            rate, counted = measure(load, warm_up)
    figures.emit(
        "preprocess.stage.images_per_s",
        round(rate, 1),
        "images/s",
        command="make bench-preprocess",
        ceiling=round(ceiling, 1),
        ceiling_is="decoding alone, on as many cores",
        instances=arguments.instances,
        cores=len(own),
        client_cores=len(others) if others != own else "shared",
        concurrency=share * arguments.clients,
        images=counted,
        settings=arguments.parameters,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
