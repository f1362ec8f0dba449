"""The ensemble against a `transformers` loop (`make bench NAME=cpu`): same checkpoint, pictures, questions, machine.

Two parts: distinct pictures with a question each, and a quarter of the pictures with four questions each, where the
ensemble's caches may help. Each part has a server of its own.
The loop is what a user would write: processor, generate (greedy), decode, one picture after the other. It gets whatever
number of threads is fastest for it on the warm-up pictures (on some machines one thread beats two).
The ensemble gets the same JPEG bytes over gRPC from `--concurrency` callers at once. Both are warmed up first, and
each answer of one is compared with the other's.
"""

from __future__ import annotations

import argparse
import os
import time

import figures
import torch
from serving import Setup, serve

from bench.parity import MAX_TOKENS, Theirs, heldout, short
from tessera_client import Client

Job = tuple[bytes, str]


def distinct(pictures: int) -> list[Job]:
    """Distinct held-out pictures, spread over the whole set, each with its question (no descriptions)."""
    return [(picture, item.question) for item, picture in heldout(pictures, short)]


def four_questions(pictures: int) -> list[Job]:
    """Distinct held-out pictures, each with four questions of different kinds, one after the other."""
    import scene

    work = []
    for item, picture in heldout(pictures, short):
        asked = list(filter(short, scene.questions(scene.sample(item.scene_seed, "heldout"))))
        # Questions come in order of their kinds, so that equal strides reach several of them.
        work += [(picture, asked[len(asked) * place // 4].text) for place in range(4)]
    return work


def transformers_loop(theirs: Theirs, work: list[Job]) -> list[str]:
    """One picture after the other through transformers; the caller times it."""
    tokens = [theirs.answered(theirs.inputs([jpeg], [question])) for jpeg, question in work]
    return [theirs.processor.decode(answer, skip_special_tokens=True) for answer in tokens]


def ensemble(client: Client, work: list[Job], concurrency: int) -> list[str]:
    """All pictures through the running server, `concurrency` at a time."""
    return [answer.text for answer in client.ask_many(work, concurrency=concurrency, max_tokens=MAX_TOKENS)]


def fastest_threads(theirs: Theirs, work: list[Job]) -> int:
    """The number of torch threads with which the loop is fastest on some pictures; also its warm-up."""
    seconds = {}
    for threads in range(1, (os.cpu_count() or 1) + 1):
        torch.set_num_threads(threads)
        transformers_loop(theirs, work[:2])
        started = time.perf_counter()
        transformers_loop(theirs, work)
        seconds[threads] = time.perf_counter() - started
    return min(seconds, key=seconds.__getitem__)


def compare(metric: str, theirs: Theirs, work: list[Job], concurrency: int) -> None:
    """Gives the jobs to both and reports how many times faster the ensemble is."""
    # Caches may help with the jobs themselves only, so the warm-up shows other bytes of the same scenes.
    warm_up = [(jpeg + b"\0", question) for jpeg, question in work[:concurrency]]
    threads = fastest_threads(theirs, warm_up)
    torch.set_num_threads(threads)
    started = time.perf_counter()
    expected = transformers_loop(theirs, work)
    loop_seconds = time.perf_counter() - started

    with serve(Setup()) as server, Client(server.grpc) as client:
        ensemble(client, warm_up, concurrency)
        started = time.perf_counter()
        ours = ensemble(client, work, concurrency)
        ensemble_seconds = time.perf_counter() - started

    count = len(work)
    same = sum(a == b for a, b in zip(ours, expected))
    print(f"transformers loop {count / loop_seconds:.2f} req/s, ensemble {count / ensemble_seconds:.2f} req/s,")
    print(f"{same} of {count} answers the same")
    figures.emit(
        metric,
        round(loop_seconds / ensemble_seconds, 3),
        "ratio",
        pictures=len({jpeg for jpeg, _ in work}),
        questions=count,
        concurrency=concurrency,
        transformers_threads=threads,
        transformers_req_s=round(count / loop_seconds, 3),
        ensemble_req_s=round(count / ensemble_seconds, 3),
        same_answers=same,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("distinct", "4-questions", "both"), default="both")
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=16)
    arguments = parser.parse_args()
    theirs = Theirs()
    if arguments.part != "4-questions":
        compare("cpu.ratio_distinct", theirs, distinct(arguments.questions), arguments.concurrency)
    if arguments.part != "distinct":
        compare("cpu.ratio_4_questions", theirs, four_questions(arguments.questions // 4), arguments.concurrency)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
