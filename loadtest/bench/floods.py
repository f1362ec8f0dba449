"""Plain questions while somebody floods the server: how much slower than in quiet? (`make bench NAME=floods`)

    python loadtest/bench floods grammars    60 at a time want an answer that matches an expression of 20,000
                                                characters, most one of its own; over gRPC
    python loadtest/bench floods answers     60 at a time want as long an answer without a grammar: what a flood of
                                                grammars is to be compared with
    python loadtest/bench floods key         128 at a time of one key of a gateway's; the questions have another

Starts a server (with the default model on the CPU unless options say otherwise). `--askers N` questions are asked at a
time, the same in quiet; the flood comes from a process of its own.
"""

import argparse
import itertools
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import figures
import httpx
import numpy as np
from serving import add_arguments, gateway, serve, setup, setup_notes

from tessera_client import Client, Retry, TesseraClientError

QUESTION = "Is there an exposed wire?"
PAUSE_S = 0.2  # of the flood, after a refusal
Ask = Callable[[], bool]
"""Asks once and says whether there was an answer. It is for one thread."""
MakeAsk = Callable[[], Ask]


def over_grpc(address: str, kind: str) -> Ask:
    """Asks the plain question, or one of the flood of this kind."""
    client = Client(address, timeout=120, retry=Retry(attempts=1))
    numbers = itertools.count(threading.get_ident() % 40)

    def ask() -> bool:
        try:
            if kind == "grammars":
                client.ask(None, "?", regex=f"a{{{19_999 - next(numbers) % 40}}}", max_tokens=1000)
            elif kind == "answers":
                client.ask(None, "?", ignore_eos=True, max_tokens=1000)
            else:
                client.ask(None, QUESTION, max_tokens=16)
        except TesseraClientError:
            return False
        return True

    return ask


def through_gateway(address: str, key: str) -> Ask:
    message = {"role": "user", "content": QUESTION}
    body = {"model": "vlm", "messages": [message], "max_tokens": 16}
    http = httpx.Client(
        base_url=f"http://{address}", timeout=120, headers={"Authorization": f"Bearer {key}"}, verify=False
    )  # one for each thread: what it would verify takes time to load

    def ask() -> bool:
        try:
            return http.post("/v1/chat/completions", json=body).status_code == 200
        except httpx.HTTPError:
            return False

    return ask


def while_asking(make: MakeAsk, askers: int, seconds: float) -> list[float]:
    """Milliseconds of the questions of the askers; one that was not answered counts as infinite."""
    taken: list[float] = []

    def run() -> None:
        ask, end = make(), time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            taken.append((time.monotonic() - began) * 1e3 if ask() else float("inf"))

    in_threads(run, askers)
    return taken


def pour(make: MakeAsk, size: int, answered: Any) -> None:
    """Asks without an end, in a process of its own."""

    def run() -> None:
        ask = make()
        while True:
            if ask():
                with answered:
                    answered.value += 1
            else:
                time.sleep(PAUSE_S)

    in_threads(run, size)


def in_threads(run: Callable[[], None], count: int) -> None:
    with ThreadPoolExecutor(count) as pool:
        for each in [pool.submit(run) for _ in range(count)]:
            each.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("grammars", "answers", "key"))
    parser.add_argument("--seconds", type=float, default=20.0, help="of quiet, and of the flood (%(default)g)")
    parser.add_argument("--askers", type=int, default=1, metavar="N", help="questions at a time (%(default)s)")
    parser.add_argument(
        "--places", type=int, default=64, metavar="N", help="the gateway's --max-in-flight (%(default)s)"
    )
    add_arguments(parser)
    parser.set_defaults(gpus="")
    options = parser.parse_args()
    with ExitStack() as ends:
        address = ends.enter_context(serve(setup(options))).grpc[0]
        make, flood = partial(over_grpc, address, "plain"), partial(over_grpc, address, options.kind)
        size, percentile = 60, 99
        if options.kind == "key":
            keys = Path(ends.enter_context(tempfile.TemporaryDirectory())) / "keys"
            keys.write_text("one name=one\nother name=other\n")
            flags = ("--keys", str(keys), "--max-in-flight", str(options.places))
            url, _ = ends.enter_context(gateway([address], 1, *flags))
            make, flood = partial(through_gateway, url, "one"), partial(through_gateway, url, "other")
            size, percentile = 128, 50
        while_asking(make, options.askers, 3.0)
        quiet = while_asking(make, options.askers, options.seconds)
        context = multiprocessing.get_context("spawn")
        answered = context.Value("i", 0)
        pouring = context.Process(target=pour, args=(flood, size, answered), daemon=True)
        pouring.start()
        time.sleep(3.0)
        before = answered.value
        flooded = while_asking(make, options.askers, options.seconds)
        rate = (answered.value - before) / options.seconds
        pouring.kill()
        pouring.join()
    told = {
        f"{name}_p{each}_ms": round(float(np.percentile(taken, each)), 1)
        for name, taken in (("quiet", quiet), ("flood", flooded))
        for each in (50, 99)
    }
    figures.emit(
        f"open.flood.{options.kind}.p{percentile}_over_quiet",
        round(told[f"flood_p{percentile}_ms"] / told[f"quiet_p{percentile}_ms"], 2),
        "ratio",
        questions=[len(quiet), len(flooded)],
        flood_req_s=round(rate, 1),
        askers=options.askers,
        **told,
        **setup_notes(options),
    )
    return 0
