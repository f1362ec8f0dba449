"""The standard workloads through the running ensemble: pictures in, answers out, over gRPC (`make bench NAME=serve`).

Starts `tessera serve` once (one server for each of `--gpus`) and runs the workloads one after the other: exactly the
workload's number of requests in flight (closed_loop.py), counted by the rule of counting.py. Beside each steady figure
stand the whole run's, p99 over p50, and on a GPU the watts, the SM clock, the temperature and the joules for a request
in the steady part. The notes of a figure say how the server did: the share of steps that ran as CUDA graphs, requests
whose embeddings came over the CPU (must be 0), the most that rows of pictures took of the engine's pool, and the share
of time for which the engine's thread waited while it planned and launched (`held_up`).

    python loadtest/bench_serve.py --workloads W1 W2 W3 W4a W4b --gpus 0 \\
        --checkpoint loadtest/shapes/internvl3-8b-shape --weights random --instances preprocess=10

    python loadtest/bench_serve.py --workloads W5a W5b W5c.c64 W5c.c10 --gpus 0 \\
        --checkpoint loadtest/shapes/mineru25-shape --weights random --instances preprocess=10

`--timeline FILE.svg` draws 500 requests from the middle of the steady part: where each spent its time (timeline.py).

`--tree DIR` runs the server of another checkout under the same load, for pairs; its figures get `--label`'s name.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from pathlib import Path

import closed_loop
import counting
import cv2
import figures
import timeline
from closed_loop import Ask, Reply
from gpu_power import Draw, GpuPower
from metrics_page import counted
from serving import Running, add_arguments, serve, setup, setup_notes
from workloads import PROMPT, WORKLOADS, Pictures, Workload

from tessera_client import Client, Retry, Timings


@dataclass(frozen=True)
class Asker:
    """Asks the servers at these addresses the requests of a workload."""

    addresses: list[str]
    workload: Workload
    seed: int
    """Of the run; a process's pictures are those of 64 x seed + its number, as the peers' load generator has them."""

    @contextmanager
    def prepare(self, number: int, stock: int) -> Iterator[Ask]:
        """For :func:`closed_loop.run`: makes the pictures, and the connection."""
        cv2.setNumThreads(1)
        pictures = Pictures(self.workload, process_seed(self.seed, number), stock)
        with self.connection() as ask:
            yield lambda: ask(pictures.deal())

    @contextmanager
    def connection(self) -> Iterator[Callable[[bytes], Reply]]:
        """What asks about a picture, on any thread."""
        with Client(self.addresses, timeout=closed_loop.PATIENCE_S, retry=Retry(attempts=1)) as client:
            yield partial(self._ask, client)

    def _ask(self, client: Client, picture: bytes) -> Reply:
        workload, first, parts = self.workload, None, 0
        if workload.streamed:
            with client.stream(picture, PROMPT, **workload.sampling) as stream:
                for _ in stream:
                    first = first or time.perf_counter()
                    parts += 1
                answer = stream.answer()
        else:
            answer = client.ask(picture, PROMPT, **workload.sampling)
        if answer.usage is None or answer.usage.completion_tokens != workload.tokens:
            raise RuntimeError(f"asked for {workload.tokens} tokens, got {answer.usage}")
        assert answer.timings is not None
        return Reply(first, workload.tokens, max(1, parts), astuple(answer.timings))


def process_seed(seed: int, number: int) -> int:
    """The seed of a process's pictures."""
    return 64 * seed + number


def first_picture(workload: Workload, seed: int) -> str:
    """Eight hex digits that name the first picture of a run, as the peers' load generator does."""
    jpeg = Pictures(workload, process_seed(seed, 0)).deal()
    return hashlib.md5(b64encode(jpeg)).hexdigest()[:8]


def stage_names() -> list[str]:
    """Of an answer's ``stages``, in their order."""
    return [f"{field.name}_ms" for field in fields(Timings)]


def stage_milliseconds(run: counting.Run) -> dict[str, float]:
    """The medians of what the server says it spent where, by name."""
    return {name: round(value, 1) for name, value in zip(stage_names(), run.stages_p50)}


def report(workload: Workload, run: counting.Run, power: Draw | None, name: str, **notes: object) -> None:
    """Emits the figures of a run; ``name`` is what their names begin with."""
    command = f'make bench NAME=serve ARGS="{" ".join(sys.argv[1:])}"'
    streamed = run.first_token_p50 is not None
    notes |= {"requests": run.count, "concurrency": workload.concurrency}
    spent: dict[str, object] = {"p50_ms": round(1e3 * run.p50, 1), "p99_ms": round(1e3 * run.p99, 1)}
    spent["stages_p50"] = stage_milliseconds(run)

    def emit(what: str, value: float, unit: str, **more: object) -> None:
        figures.emit(f"{name}.{what}", value, unit, command, **notes, **more)

    if streamed:
        emit("tok_s", round(run.tokens_s, 1), "tok/s", responses_s=round(run.parts_s, 1), **spent)
        emit("whole", round(run.whole_tokens_s, 1), "tok/s")
        ttft_p99_ms = round(1e3 * run.first_token_p99, 1)
        emit("ttft_p50_ms", round(1e3 * run.first_token_p50, 1), "ms", ttft_p99_ms=ttft_p99_ms)
    else:
        emit("req_s", round(run.requests_s, 2), "req/s", qpm=round(60 * run.requests_s), **spent)
        emit("whole", round(run.whole_requests_s, 2), "req/s")
    emit("p99_over_p50", round(run.p99 / run.p50, 3), "ratio")
    if power:
        power.emit(emit, run.requests_s)


def server_notes(
    before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]], lasted: float
) -> dict[str, object]:
    """How the servers did in these seconds, by their metrics pages (an item each)."""

    def grown(name: str) -> float:
        return sum(now[name] - then[name] for now, then in zip(after, before))

    return {
        "embeddings_on_cpu": int(grown("tessera_embeddings_on_cpu_total")),
        "graph_steps": round(grown("tessera_graph_steps_total") / max(1.0, grown("tessera_steps_total")), 3),
        "held_up": round(grown("tessera_engine_held_up_seconds_total") / lasted / len(after), 4),
        "embedding_mib_peak": round(max(now["tessera_embedding_bytes_peak"] for now in after) / 2**20, 1),
    }


def measure(
    server: Running,
    workload: Workload,
    gpus: tuple[str, ...],
    processes: int,
    seed: int,
    name: str,
    drawing: Path | None = None,
    **notes: object,
) -> None:
    """Runs one workload and emits its figures; ``drawing``: where its timeline goes."""
    before = [counted(url) for url in server.metrics]
    asker = Asker(server.grpc, workload, seed)
    with GpuPower(gpus) as power:
        began, answers = closed_loop.run(
            asker.prepare, workload.concurrency, counting.requests(workload.concurrency), processes
        )
    after = [counted(url) for url in server.metrics]
    run = counting.count(began, answers, workload.concurrency)
    lasted = answers[-1].ended - began

    report(
        workload,
        run,
        power.between(run.began, run.ended),
        name,
        gpus=len(gpus),
        seed=seed,
        first_picture=first_picture(workload, seed),
        startup_s=server.startup_s,
        **server_notes(before, after, lasted),
        **notes,
    )
    if drawing:
        steady = counting.steady_part(answers, workload.concurrency)
        print(timeline.write(drawing, steady, f"{name}, {workload.concurrency} in flight"), file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["W1"], choices=sorted(WORKLOADS))
    add_arguments(parser)
    parser.add_argument("--processes", type=int, default=6, help="of the load generator")
    parser.add_argument("--concurrency", type=int, help="instead of the workload's own")
    parser.add_argument("--seed", type=int, help="of the pictures; default: a new one")
    parser.add_argument("--timeline", type=Path, metavar="FILE.svg", help="of several workloads: FILE_W1.svg, ...")
    parser.add_argument("--label", default="bf16", help="stands in the figures' names")
    arguments = parser.parse_args()
    asked = setup(arguments)
    gpus = asked.gpus
    label = arguments.label + (f".{len(gpus)}gpus" if len(gpus) > 1 else "") + ".no_mps" * arguments.no_mps
    if arguments.concurrency:
        label = f"c{arguments.concurrency}" + f".{label}" * (label != "bf16")
    seed = random.randrange(1 << 30) if arguments.seed is None else arguments.seed
    with serve(asked) as server:
        for name in arguments.workloads:
            workload = WORKLOADS[name]
            if arguments.concurrency:
                workload = replace(workload, concurrency=arguments.concurrency)
            # No two workloads share pictures, which the server would know by then.
            own_seed = seed + list(WORKLOADS).index(name)
            drawing = arguments.timeline
            if drawing and len(arguments.workloads) > 1:
                drawing = drawing.with_stem(f"{drawing.stem}_{name}")
            notes = setup_notes(arguments)
            measure(server, workload, gpus, arguments.processes, own_seed, workload.figure(label), drawing, **notes)
            print(f"{name} is done", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
