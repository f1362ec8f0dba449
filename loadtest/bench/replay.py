"""A replay of real documents without real weights: pages of PDFs as MinerU's client would ask about them (`make bench
NAME=replay`).

Each page is asked as `tessera parse` asks: the layout, then all its crops at once, with MinerU's prompts, sampling
parameters and pictures, by its system prompt, over gRPC. The weights are random, so that answers mean nothing; what
the layout finds and how long each answer is (`ignore_eos`) come from the set of pages, which `replay_pages` makes from
the text layers of PDFs. So speed is replayed, and nothing is said about what a model would read.

    python loadtest/bench replay replay.zip --gpus 0 \\
        --checkpoint loadtest/shapes/mineru25-shape --weights random --instances preprocess=10

Two loads. `c10`: exactly 10 requests in flight, of 10 pages. `saturated`: 96 pages in flight, at most 256 of their
requests, as many as the engine runs at once. Pages are counted by the rule of counting.py, where concurrency is the
number of pages; requests, tokens and latencies are those of the steady part's pages. Answers are streamed, so that
first tokens are seen; with `--whole` they are asked for whole, as `tessera parse` does. Pictures are cut and encoded
before the load begins, and each time that one is sent it has a mark of its own, so that no cache knows it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import closed_loop
import counting
import figures
import measuring
from closed_loop import Answered, Ask, Reply
from measuring import Taken, drive
from serving import add_arguments, serve, setup, setup_notes
from targets import reply_of
from tqdm import tqdm

from bench.replay_set import ReplaySet, marked
from tessera_client import Client, Retry

LABEL = "a replay: true pages, crops and lengths, random weights"


@dataclass(frozen=True)
class Load:
    """``pages`` are in flight at all times, and at most ``requests`` of theirs."""

    name: str
    pages: int
    requests: int


LOADS = {load.name: load for load in (Load("c10", 10, 10), Load("saturated", 96, 256))}


def picture_file(folder: Path, page: int, request: int) -> Path:
    """Where the picture of a page's request lies once it is encoded."""
    return folder / f"{page}-{request}.png"


def encode(path: Path, folder: Path, page: int) -> None:
    """Writes a page's pictures."""
    pages = ReplaySet(path)
    picture = pages.picture(page)
    for number, request in enumerate(pages.pages[page].requests):
        picture_file(folder, page, number).write_bytes(pages.client.picture(picture, request))


def encode_all(path: Path, folder: Path, count: int) -> None:
    """All pages', on all cores."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(tqdm(pool.map(partial(encode, path, folder), range(count)), "cutting crops", count, unit="page"))


class Reader:
    """Asks servers about the pages of a set. All processes of a load have one together.

    Args:
        addresses: of the servers.
        path, folder: the set, and its encoded pictures.
        load: how many requests may be in flight.
        seed: of the marks: no two runs with different ones send equal pictures.
        whole: ask for answers whole instead of streamed.
    """

    def __init__(
        self, addresses: Sequence[str], path: Path, folder: Path, load: Load, seed: int, whole: bool = False
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._addresses, self._path, self._folder = list(addresses), path, folder
        self._load, self._seed, self._whole = load, seed, whole
        self._begun: Any = context.Value("q", 0)
        self._slots: Any = context.Semaphore(load.requests)

    @contextmanager
    def prepare(self, number: int, stock: int) -> Iterator[Ask]:
        """For :func:`closed_loop.run`, whose requests are pages here."""
        pages = ReplaySet(self._path)
        with (
            Client(self._addresses, timeout=closed_loop.PATIENCE_S, retry=Retry(attempts=1)) as client,
            ThreadPoolExecutor(self._load.requests) as pool,
        ):
            yield lambda: self._read(pages, client, pool)

    def _read(self, pages: ReplaySet, client: Client, pool: ThreadPoolExecutor) -> Reply:
        """One page: its layout, then all its crops."""
        with self._begun.get_lock():
            turn = self._begun.value
            self._begun.value += 1
        ask = partial(self._ask, pages, client, turn)
        layout = ask(0)
        crops = pool.map(ask, range(1, len(pages.pages[in_turn(turn, len(pages.pages))].requests)))
        answers = (layout, *crops)
        tokens, parts = sum(answer.tokens for answer in answers), sum(answer.parts for answer in answers)
        return Reply(None, tokens, parts, made_of=answers)

    def _ask(self, pages: ReplaySet, client: Client, turn: int, number: int) -> Answered:
        page = in_turn(turn, len(pages.pages))
        request = pages.pages[page].requests[number]
        picture = picture_file(self._folder, page, number).read_bytes()
        messages = pages.client.messages(request, marked(picture, f"{self._seed} {turn} {number}"))
        chat = client.chat if self._whole else client.chat_stream
        with self._slots:
            began = time.perf_counter()
            return Answered.of(reply_of(chat(messages, **pages.client.sampling(request)), request.tokens), began)


def in_turn(turn: int, pages: int) -> int:
    """The page of a turn: each time through all of them in another order, the same in all runs."""
    order = list(range(pages))
    random.Random(turn // pages).shuffle(order)
    return order[turn % pages]


def pages_of_a_run(load: Load, pages: int) -> int:
    """How many make whole rounds (counting.py), at least five steady ones, and have each page read at least once."""
    least = counting.requests(load.pages)
    return least + max(0, -(-(pages - least) // load.pages)) * load.pages


def first_token_ms(answer: Answered) -> float:
    """From sending to the first token, as the client saw it; by the server's own clock where it was not streamed."""
    return sum(answer.stages[:-1]) if answer.first_token is None else 1e3 * answer.first_token


def token_ms(answer: Answered) -> float:
    """For each token after the first."""
    spent = answer.stages[-1] if answer.first_token is None else 1e3 * (answer.seconds - answer.first_token)
    return spent / max(1, answer.tokens - 1)


def report(load: Load, taken: Taken, name: str, **notes: Any) -> None:
    """Emits the figures of a run; ``name`` is what their names begin with."""
    run, steady = taken.run, taken.steady
    answers = [answer for page in steady for answer in page.made_of]
    asked = [len(page.made_of) for page in steady]

    def p50(values: Sequence[float]) -> float:
        return round(counting.percentile(sorted(values), 0.5), 2)

    notes |= {
        "what": LABEL,
        "pages": len(steady),
        "pages_in_flight": load.pages,
        "requests_in_flight": load.requests,
        "tokens_a_page": round(fmean(page.tokens for page in steady), 1),
        "crops_a_page": round(fmean(asked) - 1, 1),
        **taken.notes,
    }

    def emit(what: str, value: float, unit: str, **more: Any) -> None:
        figures.emit(f"{name}.{what}", value, unit, **notes, **more)

    stages = zip(measuring.stage_names(), zip(*(answer.stages for answer in answers)))
    emit("pages_s", round(run.requests_s, 3), "pages/s", stages_p50={stage: p50(ms) for stage, ms in stages})
    emit("whole", round(run.whole_requests_s, 3), "pages/s")
    emit("req_s", round(run.requests_s * fmean(asked[1:]), 2), "req/s")
    emit("tok_s", round(run.tokens_s, 1), "tok/s", responses_s=round(run.parts_s, 1))
    for what, each in (("prefill", first_token_ms), ("decode", token_ms)):
        apart = {f"{what}_p50_ms_of_layouts": p50([each(page.made_of[0]) for page in steady])}
        emit(f"{what}_p50_ms", p50([each(answer) for answer in answers]), "ms", **apart)
    emit("page_p50_s", round(run.p50, 3), "s", p99_s=round(run.p99, 3))
    if taken.power:
        taken.power.emit(emit, run.requests_s, "page")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", type=Path, help="what replay_pages made")
    add_arguments(parser)
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--pages", type=int, help="in flight, instead of the load's own")
    parser.add_argument("--requests", type=int, help="in flight at most, instead of the load's own")
    parser.add_argument("--processes", type=int, default=8, help="of the load generator")
    parser.add_argument("--whole", action="store_true", help="ask for answers whole, as tessera parse does")
    parser.add_argument("--seed", type=int, help="of the pictures' marks; default: a new one")
    parser.add_argument("--label", default="bf16", help="stands in the figures' names unless it is bf16")
    arguments = parser.parse_args()
    asked = setup(arguments)
    seed = random.randrange(1 << 30) if arguments.seed is None else arguments.seed
    count = len(ReplaySet(arguments.set).pages)
    with tempfile.TemporaryDirectory(prefix="tessera-replay-") as folder:
        encode_all(arguments.set, Path(folder), count)
        with serve(asked) as server:
            for name in arguments.loads:
                load = LOADS[name]
                load = replace(load, pages=arguments.pages or load.pages, requests=arguments.requests or load.requests)
                # No two loads share pictures, which the server would know by then.
                own_seed = seed + list(LOADS).index(name)
                reader = Reader(server.grpc, arguments.set, Path(folder), load, own_seed, arguments.whole)
                requests = pages_of_a_run(load, count)
                taken = drive(reader.prepare, load.pages, requests, arguments.processes, asked.gpus, server.metrics)
                named = [part for part in (arguments.label, name) if part not in ("bf16", "saturated")]
                report(
                    load,
                    taken,
                    ".".join(["docs.replay", *named]),
                    gpus=len(asked.gpus),
                    seed=own_seed,
                    startup_s=server.startup_s,
                    streamed=not arguments.whole,
                    **setup_notes(arguments),
                )
    return 0
