"""The preprocess stage alone in the real server (`make bench NAME=preprocess_stage`): 448x448 JPEGs a second.

Starts tritonserver with a repository that holds only `preprocess`, and keeps requests in flight over gRPC from several
client processes. They ask for INPUT_IDS alone: PIXELS stay inside the server, as they do in the ensemble. Every client
goes round its own stock of distinct pictures; nothing in this stage remembers a picture. With more cores than
instances the server gets as many cores as it has instances and the clients get the others.

    bash loadtest/carried_server.sh .carry/env.tar.xz python loadtest/bench preprocess_stage --instances 8
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import closed_loop
import counting
import cv2
import figures
import numpy as np
from closed_loop import Ask, Reply
from serving import Setup, pairs, serve
from workloads import PROMPT, picture

from tessera.preprocess.decode import decode

STAGE = "preprocess"
SIZE = (448, 448)
STOCK = 64
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Asker:
    """Asks the stage at this address, from these cores."""

    address: str
    cores: frozenset[int]

    @contextmanager
    def prepare(self, number: int, stock: int) -> Iterator[Ask]:
        """For :func:`closed_loop.run`; pictures come again, so that many requests need no more than 64."""
        import tritonclient.grpc as grpc

        os.sched_setaffinity(0, self.cores)
        requests = []
        for picture_number in range(STOCK):
            jpeg = picture(*SIZE, (number, picture_number))
            image, text = grpc.InferInput("image", [1], "BYTES"), grpc.InferInput("text_input", [1], "BYTES")
            image.set_data_from_numpy(np.array([jpeg], dtype=object))
            text.set_data_from_numpy(np.array([PROMPT.encode()], dtype=object))
            requests.append([image, text])
        wanted = [grpc.InferRequestedOutput("INPUT_IDS")]
        turns = itertools.cycle(requests)
        with grpc.InferenceServerClient(self.address) as client:

            def ask() -> Reply:
                client.infer(STAGE, next(turns), outputs=wanted, client_timeout=PATIENCE_S)
                return Reply(None, 0)

            yield ask


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
    parser.add_argument("--concurrency", type=int, default=0, help="requests in flight; 4 for each instance by default")
    parser.add_argument("--rounds", type=int, default=1000, help="requests for each one in flight")
    parser.add_argument("--set", nargs="*", default=[], metavar="PARAMETER=VALUE", dest="parameters")
    arguments = parser.parse_args()
    own, others = shares(arguments.instances)
    concurrency = arguments.concurrency or 4 * arguments.instances
    ceiling = arguments.instances * decodes_a_second()
    settings = {f"{STAGE}.{name}": value for name, value in pairs(arguments.parameters, "PARAMETER=VALUE").items()}
    os.sched_setaffinity(0, own)  # the server inherits it
    with serve(Setup(settings=settings, instances={STAGE: arguments.instances}, only=(STAGE,))) as server:
        os.sched_setaffinity(0, others)
        asker = Asker(server.grpc[0], frozenset(others))
        requests = counting.warm_up(concurrency) + arguments.rounds * concurrency
        began, answers = closed_loop.run(asker.prepare, concurrency, requests, arguments.clients)
    run = counting.count(began, answers, concurrency)
    figures.emit(
        "preprocess.stage.images_per_s",
        round(run.requests_s, 1),
        "images/s",
        ceiling=round(ceiling, 1),
        ceiling_is="decoding alone, on as many cores",
        instances=arguments.instances,
        cores=len(own),
        client_cores=len(others) if others != own else "shared",
        concurrency=concurrency,
        images=run.count,
        settings=arguments.parameters,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
