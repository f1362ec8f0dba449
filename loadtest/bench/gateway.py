"""What the gateway costs: the same server, pictures and load, asked over the SDK's gRPC and through the gateway in turn
(`make bench NAME=gateway`).

Runs of both take turns, each with pictures of its own, so that what else the machine does falls on both; a figure is
the median over the pairs. Exactly N requests are in flight (closed_loop.py), counted by the rule of counting.py.
`over_grpc` is the gateway's rate by the SDK's, `alone_ms` what it adds to the median of one request at a time.

    python loadtest/bench gateway                                  on the CPU, W1 with 16 in flight
    python loadtest/bench gateway --workloads W1 W4a --gpus 0 --workers 4
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import replace
from typing import Any

import closed_loop
import figures
from measuring import stage_milliseconds, take
from serving import add_arguments, gateway, serve, setup
from targets import Asker, OpenAiAsker, TesseraAsker
from workloads import WORKLOADS, Workload


def alone(asker: Asker, requests: int) -> float:
    """The median of a request's milliseconds, one at a time."""
    _, answers = closed_loop.run(asker.prepare, 1, requests, 1)
    return 1e3 * statistics.median(answer.seconds for answer in answers[requests // 5 :])


def compare(workload: Workload, servers: list[str], address: str, options: argparse.Namespace, name: str) -> None:
    """Runs the pairs of one workload and emits its figures."""
    seed = random.randrange(1 << 28)
    rate = "tokens_s" if workload.streamed else "requests_s"
    over_grpc, through = [], []
    both: list[dict[str, Any]] = []
    for pair in range(options.pairs):
        direct = take(TesseraAsker(servers, workload, seed + 2 * pair), options.processes).run
        door = take(OpenAiAsker([address], workload, seed + 2 * pair + 1), options.processes).run
        over_grpc.append(getattr(door, rate) / getattr(direct, rate))
        through.append(getattr(door, rate))
        runs = {"grpc": direct, "gateway": door}
        both.append({way: round(getattr(run, rate), 2) for way, run in runs.items()})
        both[-1]["stages_p50_ms"] = {way: stage_milliseconds(run) for way, run in runs.items()}
        print(f"{workload.name}, pair {pair + 1}: {both[-1]}", file=sys.stderr, flush=True)
    notes: dict[str, Any] = {"concurrency": workload.concurrency, "workers": options.workers}
    figures.emit(f"{name}.over_grpc", round(statistics.median(over_grpc), 3), "ratio", **notes, pairs=both)
    unit, what = ("tok/s", "tok_s") if workload.streamed else ("req/s", "req_s")
    figures.emit(f"{name}.{what}", round(statistics.median(through), 2), unit, **notes)
    if options.alone and not workload.streamed:
        single = replace(workload, concurrency=1)
        spent = {
            "grpc": alone(TesseraAsker(servers, single, seed + 1000), options.alone),
            "gateway": alone(OpenAiAsker([address], single, seed + 1001), options.alone),
        }
        notes = {"p50_ms": {way: round(ms, 2) for way, ms in spent.items()}, "requests": options.alone}
        figures.emit(f"{name}.alone_ms", round(spent["gateway"] - spent["grpc"], 2), "ms", **notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["W1"], choices=sorted(WORKLOADS))
    parser.add_argument("--concurrency", type=int, help="default: 16 on the CPU, the workload's own on a GPU")
    parser.add_argument("--workers", type=int, default=1, help="of the gateway")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--alone", type=int, default=60, help="requests one at a time; 0 for none")
    parser.add_argument("--processes", type=int, help="of the load generator; default: 1 on the CPU, 6 on a GPU")
    add_arguments(parser)
    parser.set_defaults(gpus="")
    options = parser.parse_args()
    options.processes = options.processes or (6 if options.gpus else 1)
    with serve(setup(options)) as server, gateway(server.grpc, options.workers) as (address, _):
        for name in options.workloads:
            workload = WORKLOADS[name]
            in_flight = options.concurrency or (workload.concurrency if options.gpus else 16)
            label = f"gateway.{name}" if options.gpus else "gateway"
            compare(replace(workload, concurrency=in_flight), server.grpc, address, options, label)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
