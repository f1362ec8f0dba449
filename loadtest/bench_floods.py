"""Plain questions while somebody floods the server: how much slower than in quiet? (`make bench NAME=floods`)

    python loadtest/bench_floods.py grammars    60 at a time want an answer that matches an expression of 20,000
                                                characters, most one of its own; over gRPC
    python loadtest/bench_floods.py key         128 at a time of one key of a gateway's; the questions have another

Starts a server with the default model, on the CPU. `--askers N` questions are asked at a time, the same in quiet.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import figures
import httpx
import numpy as np
from bench_gateway import gateway
from serving import Setup, serve

from tessera_client import Client, Retry, TesseraClientError

QUESTION = "Is there an exposed wire?"
Ask = Callable[[], str]
"""Asks once and says how it ended."""


def asked(client: Client, question: str, **sampling: object) -> str:
    """Over gRPC."""
    try:
        client.ask(None, question, **sampling)
    except TesseraClientError as error:
        return type(error).__name__
    return "answered"


def posted(client: httpx.Client, key: str) -> str:
    """Through the gateway."""
    body = {"model": "vlm", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16}
    try:
        status = client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}).status_code
    except httpx.HTTPError as error:
        return type(error).__name__
    return "answered" if status == 200 else str(status)


@contextmanager
def grammars(address: str) -> Iterator[tuple[Ask, Ask]]:
    """A plain question, and one of the flood."""
    numbers = itertools.count()
    with Client(address, timeout=120, retry=Retry(attempts=1)) as client:
        yield (
            lambda: asked(client, QUESTION, max_tokens=16),
            lambda: asked(client, "?", regex=f"a{{{19_999 - next(numbers) % 40}}}", max_tokens=1000),
        )


@contextmanager
def key(address: str) -> Iterator[tuple[Ask, Ask]]:
    with ExitStack() as ends:
        keys = Path(ends.enter_context(tempfile.TemporaryDirectory())) / "keys"
        keys.write_text("one name=one\nother name=other\n")
        url = ends.enter_context(gateway([address], 1, "--keys", str(keys), "--max-in-flight", "64"))
        limits = httpx.Limits(max_connections=400)
        client = ends.enter_context(httpx.Client(base_url=f"http://{url}", timeout=120, limits=limits, trust_env=False))
        yield lambda: posted(client, "one"), lambda: posted(client, "other")


def while_asking(ask: Ask, askers: int, seconds: float) -> list[float]:
    """Milliseconds of the questions of so many askers; one that was not answered counts as infinite."""
    taken: list[float] = []

    def run() -> None:
        end = time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            ended = ask()
            taken.append((time.monotonic() - began) * 1e3 if ended == "answered" else float("inf"))

    threads = [threading.Thread(target=run) for _ in range(askers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


def pour(ask: Ask, outcomes: Counter[str], stop: threading.Event) -> None:
    while not stop.is_set():
        outcomes[ended := ask()] += 1
        if ended != "answered":
            time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = {"grammars": (grammars, 60, 99), "key": (key, 128, 50)}
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--seconds", type=float, default=20.0, help="of quiet, and of the flood (%(default)g)")
    parser.add_argument("--askers", type=int, default=1, metavar="N", help="questions at a time (%(default)s)")
    options = parser.parse_args()
    flood, size, percentile = kinds[options.kind]
    outcomes: Counter[str] = Counter()
    stop = threading.Event()
    with serve(Setup()) as server, flood(server.grpc[0]) as (ask, pouring):
        while_asking(ask, options.askers, 3.0)
        quiet = while_asking(ask, options.askers, options.seconds)
        threads = [threading.Thread(target=pour, args=(pouring, outcomes, stop), daemon=True) for _ in range(size)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        flooded = while_asking(ask, options.askers, options.seconds)
        stop.set()
        told = {f"{name}_p{p}_ms": round(float(np.percentile(taken, p)), 1)
                for name, taken in (("quiet", quiet), ("flood", flooded)) for p in (50, 99)}  # fmt: skip
        name = f"p{percentile}"
        figures.emit(
            f"open.flood.{options.kind}.{name}_over_quiet",
            round(told[f"flood_{name}_ms"] / told[f"quiet_{name}_ms"], 2),
            "ratio",
            f'make bench NAME=floods ARGS="{shlex.join(sys.argv[1:])}"',
            questions=[len(quiet), len(flooded)],
            outcomes=dict(outcomes),
            askers=options.askers,
            **told,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
