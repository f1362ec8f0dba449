"""The server on a CPU against a loop of `transformers`, in turns (`make bench NAME=cpu`): same checkpoint, pictures,
questions, machine.

The loop is what a user would write: processor, generate (greedy), decode, one picture after the other, in the dtype and
with the number of threads that are the fastest for it. The server gets the same JPEG bytes over gRPC, `--concurrency`
at a time. Nobody sees a picture twice, and every answer of one is compared with the other's.

    distinct      a question a picture: `cpu.ratio_distinct`, how many times as many answers a second
    4-questions   four about each, one after the other, where caches may help: `cpu.ratio_4_questions`
    first-token   one picture of 448 x 448 pixels at a time, until the first token: `cpu.ratio_first_token`, how many
                  times as fast the server is

Keep the machine quiet meanwhile: torch's threads wait for each other spinning, so that beside one busy process the loop
takes up to thirty times as long, the server twice. A part takes two to five minutes.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import figures
import torch
from serving import Setup, serve
from turns import Comparison, compare
from workloads import WORKLOADS, Pictures

from bench.parity import MAX_TOKENS, Theirs
from tessera_client import Client

Job = tuple[bytes, str]
FIRST_TOKENS = 8  # of a turn
PARTS = {
    "distinct": "cpu.ratio_distinct",
    "4-questions": "cpu.ratio_4_questions",
    "first-token": "cpu.ratio_first_token",
}


class Told(NamedTuple):
    """Answers a second, or first tokens, and the answers."""

    rate: float
    answers: list[str]


class Deck:
    """Held-out pictures in a random order, none twice."""

    def __init__(self) -> None:
        import scene

        self._left = [item for item in scene.heldout() if item.kind != "description"]
        random.shuffle(self._left)
        self._dealt: tuple[int, list[Job]] = -1, []

    def deal(self, pictures: int, questions: int, seed: int = 0) -> list[Job]:
        """This many, with ``questions`` each, of different kinds with answers of a word or two. Both ways get the same
        by one seed."""
        if self._dealt[0] != seed or not seed:
            self._dealt = seed, [job for _ in range(pictures) for job in self._next(questions)]
        return self._dealt[1]

    def _next(self, questions: int) -> list[Job]:
        import scene

        item = self._left.pop()
        room = scene.sample(item.scene_seed, "heldout")
        # They come in the order of their kinds: equal strides reach several.
        asked = [each.text for each in scene.questions(room) if each.kind != "description"]
        texts = [asked[len(asked) * place // questions] for place in range(questions)] if questions > 1 else []
        jpeg = scene.encode_jpeg(room)
        return [(jpeg, text) for text in texts or [item.question]]


def by_loop(theirs: Theirs, work: Sequence[Job]) -> Told:
    began = time.perf_counter()
    tokens = [theirs.answered(theirs.inputs([jpeg], [question])) for jpeg, question in work]
    answers = [theirs.processor.decode(answer, skip_special_tokens=True) for answer in tokens]
    return Told(len(work) / (time.perf_counter() - began), answers)


def by_server(client: Client, concurrency: int, work: Sequence[Job]) -> Told:
    began = time.perf_counter()
    answers = [answer.text for answer in client.ask_many(work, concurrency=concurrency, max_tokens=MAX_TOKENS)]
    return Told(len(work) / (time.perf_counter() - began), answers)


def set_fastest(theirs: Theirs, deck: Deck, dtypes: Sequence[str]) -> None:
    """Has the loop run in the dtype and with the number of torch's threads that are the fastest; also its warm-up."""
    rates, work = {}, deck.deal(8, 1)
    for way in product(dtypes, range(1, len(os.sched_getaffinity(0)) + 1)):
        _run_by(theirs, *way)
        by_loop(theirs, work[:2])
        rates[way] = by_loop(theirs, work).rate
    _run_by(theirs, *max(rates, key=rates.__getitem__))


def _run_by(theirs: Theirs, dtype: str, threads: int) -> None:
    theirs.dtype = getattr(torch, dtype)
    theirs.model.to(theirs.dtype)
    torch.set_num_threads(threads)


def first_tokens(ask: Callable[[bytes, str], object], seed: int) -> Told:
    """By the median of some pictures, one at a time."""
    workload, spent = WORKLOADS["W1"], []
    pictures = Pictures(workload, seed, FIRST_TOKENS)
    for _ in range(FIRST_TOKENS):
        picture = pictures.deal()
        began = time.perf_counter()
        ask(picture, workload.prompts[0])
        spent.append(time.perf_counter() - began)
    return Told(1 / median(spent), [])


def comparison(part: str, theirs: Theirs, client: Client, deck: Deck, options: argparse.Namespace) -> Comparison:
    if part == "first-token":
        ours: Callable[[bytes, str], object] = partial(client.ask, max_tokens=1)
        above = partial(first_tokens, ours)
        below = partial(first_tokens, lambda jpeg, text: theirs.tokens(theirs.inputs([jpeg], [text]), 1, 1))
    else:
        questions = 4 if part == "4-questions" else 1
        deal = partial(deck.deal, options.questions // questions, questions)
        above = lambda seed: by_server(client, options.concurrency, deal(seed))  # noqa: E731
        below = lambda seed: by_loop(theirs, deal(seed))  # noqa: E731
    return Comparison(above, below, lambda told: told.rate)


def report(name: str, found: Comparison, theirs: Theirs, options: argparse.Namespace) -> None:
    below, above = zip(*found.turns)
    unit = "ms" if name.endswith("first_token") else "req_s"
    about: dict[str, Any] = {
        f"{who}_{unit}": [round(1e3 / told.rate if unit == "ms" else told.rate, 2) for told in side]
        for who, side in (("server", above), ("transformers", below))
    }
    pairs = [pair for ours, loop in zip(above, below) for pair in zip(ours.answers, loop.answers, strict=True)]
    if pairs:
        about |= {"same": sum(a == b for a, b in pairs), "of": len(pairs), "concurrency": options.concurrency}
    ratio = found.ratio
    about |= {"loop": f"{theirs.dtype}".removeprefix("torch."), "threads": torch.get_num_threads()}
    figures.emit(name, round(ratio.value, 3), "ratio", ci95=round(ratio.ci95, 3), **about)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--questions", type=int, default=48, help="of a turn")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=4, help="after which a part begins no other turn")
    dtypes = ("float32", "bfloat16")
    parser.add_argument(
        "--loop", nargs="+", choices=dtypes, default=dtypes, help="dtypes, of which it takes the fastest"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="STAGE.PARAMETER=VALUE", dest="settings")
    options = parser.parse_args()
    theirs, deck = Theirs(), Deck()
    set_fastest(theirs, deck, options.loop)
    setup = Setup(settings=dict(each.split("=", 1) for each in options.settings))
    with serve(setup) as server, Client(server.grpc) as client:
        by_server(client, options.concurrency, deck.deal(16, 1))  # its warm-up
        for part in options.parts:
            found = comparison(part, theirs, client, deck, options)
            compare({part: found}, 60 * options.minutes)
            report(PARTS[part], found, theirs, options)
    return 0
