"""Plain questions while others flood the server with grammars that take long: how much slower than in quiet?

    make bench NAME=grammar_flood

Starts a server with the default model. Each request of the flood wants an answer that matches an expression of 20,000
characters; most have one of their own, as somebody would who means harm.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from pathlib import Path

import numpy as np

import tessera
from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server
from tessera_client import Client, Retry, TesseraClientError

REPOSITORY = Path(tessera.__file__).resolve().parents[2] / "model_repository"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of quiet, and of the flood (%(default)g)")
    parser.add_argument("--flood", type=int, default=60, metavar="N", help="its requests at a time (%(default)s)")
    parser.add_argument("--distinct", type=int, default=40, metavar="N", help="grammars of the flood (%(default)s)")
    options = parser.parse_args()
    with Server(ServerOptions(REPOSITORY, http_port=0, grpc_port=0, metrics_port=0)) as server:
        ask(server.grpc_url, 3.0)
        quiet = ask(server.grpc_url, options.seconds)
        outcomes: list[str] = []
        stop = threading.Event()
        numbers = itertools.count()
        flood = [
            threading.Thread(
                target=attack, args=(server.grpc_url, options.distinct, numbers, outcomes, stop), daemon=True
            )
            for _ in range(options.flood)
        ]
        for each in flood:
            each.start()
        time.sleep(1.0)
        flooded = ask(server.grpc_url, options.seconds)
        stop.set()
    row = {"flood": options.flood, "distinct": options.distinct} | figures("quiet", quiet) | figures("flood", flooded)
    row["times_slower_p99"] = round(row["flood_p99_ms"] / row["quiet_p99_ms"], 2)
    row["outcomes"] = {each: outcomes.count(each) for each in sorted(set(outcomes))}
    print(json.dumps(row))


def ask(url: str, seconds: float) -> list[float]:
    """Milliseconds of plain questions, one after the other; those that failed count as infinite."""
    taken, end = [], time.monotonic() + seconds
    with Client(url, timeout=60, retry=Retry(attempts=1)) as client:
        while (began := time.monotonic()) < end:
            try:
                client.ask(None, "Is there an exposed wire?", max_tokens=16)
                taken.append((time.monotonic() - began) * 1e3)
            except TesseraClientError:
                taken.append(float("inf"))
    return taken


def attack(url: str, distinct: int, numbers: itertools.count[int], outcomes: list[str], stop: threading.Event) -> None:
    with Client(url, timeout=120, retry=Retry(attempts=1)) as client:
        while not stop.is_set():
            try:
                client.ask(None, "?", regex=f"a{{{19_999 - next(numbers) % distinct}}}", max_tokens=1000)
                outcomes.append("answered")
            except TesseraClientError as error:
                outcomes.append(type(error).__name__)
                time.sleep(0.2)


def figures(name: str, taken: list[float]) -> dict[str, float]:
    return {
        f"{name}_questions": len(taken),
        f"{name}_p50_ms": round(float(np.percentile(taken, 50)), 1),
        f"{name}_p99_ms": round(float(np.percentile(taken, 99)), 1),
    }


if __name__ == "__main__":
    main()
