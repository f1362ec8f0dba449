"""A closed loop's run and its figures, of any server: counted by the rule of counting.py, and on a GPU with the
watts, the SM clock, the temperature and the joules for a request in the steady part.

The notes of a figure say how sure it is (`ci95`: half the interval), and of our server how it did: the share of steps
that ran as CUDA graphs, requests whose embeddings came over the CPU (must be 0), the most that rows of pictures took of
the engine's pool, and the shares of time for which the engine's thread waited while it planned and launched
(`held_up`), and for which the vision stage's launched (`launching`; 0 of a server that does not tell).
"""

import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

import closed_loop
import counting
import figures
from closed_loop import Answered
from gpu_power import Draw, GpuPower
from targets import Asker, first_picture
from workloads import Workload

from tessera_client import Timings


def stage_names() -> list[str]:
    """Of an answer's ``stages``, in their order."""
    return [f"{field.name}_ms" for field in fields(Timings)]


def stage_milliseconds(run: counting.Run) -> dict[str, float]:
    """The medians of what the server says it spent where, by name."""
    return {name: round(value, 1) for name, value in zip(stage_names(), run.stages_p50)}


def report(workload: Workload, run: counting.Run, power: Draw | None, name: str, **notes: object) -> None:
    """Emits the figures of a run; ``name`` is what their names begin with. The notes stand with its rate alone."""
    streamed = run.first_token_p50 is not None
    notes |= {"requests": run.count, "concurrency": workload.concurrency}
    spent: dict[str, object] = {"p50_ms": round(1e3 * run.p50, 1), "p99_ms": round(1e3 * run.p99, 1)}
    if run.stages_p50:  # no other server tells them
        spent["stages_p50"] = stage_milliseconds(run)

    def emit(what: str, value: float, unit: str, **more: object) -> None:
        figures.emit(f"{name}.{what}", value, unit, **more)

    if streamed:
        spent |= {"responses_s": round(run.parts_s, 1), "ci95": round(run.margin * run.tokens_s, 1)}
        emit("tok_s", round(run.tokens_s, 1), "tok/s", **notes, **spent)
        emit("whole", round(run.whole_tokens_s, 1), "tok/s")
        ttft_p99_ms = round(1e3 * run.first_token_p99, 1)
        emit("ttft_p50_ms", round(1e3 * run.first_token_p50, 1), "ms", ttft_p99_ms=ttft_p99_ms)
    else:
        spent |= {"qpm": round(60 * run.requests_s), "ci95": round(run.margin * run.requests_s, 2)}
        emit("req_s", round(run.requests_s, 2), "req/s", **notes, **spent)
        emit("whole", round(run.whole_requests_s, 2), "req/s")
    emit("p99_over_p50", round(run.p99 / run.p50, 3), "ratio")
    if power:
        power.emit(emit, run.requests_s)


def counted(url: str) -> Counter[str]:
    """What a running server counted so far, from its metrics page: each metric's value, added up over its labels."""
    with urllib.request.urlopen(url, timeout=10) as page:
        lines = page.read().decode().splitlines()
    values: Counter[str] = Counter()
    for line in lines:
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name.partition("{")[0]] += float(value)  # type: ignore[assignment]
    return values


def server_notes(
    before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]], lasted: float
) -> dict[str, object]:
    """How the servers did in these seconds, by their metrics pages (an item each)."""

    def grown(name: str) -> float:
        return sum(now[name] - then[name] for now, then in zip(after, before))

    def share(name: str) -> float:
        return round(grown(name) / lasted / len(after), 4)

    return {
        "embeddings_on_cpu": int(grown("tessera_embeddings_on_cpu_total")),
        "steps_s": round(grown("tessera_steps_total") / lasted / len(after), 2),
        "graph_steps": round(grown("tessera_graph_steps_total") / max(1.0, grown("tessera_steps_total")), 3),
        "held_up": share("tessera_engine_held_up_seconds_total"),
        "launching": share("tessera_vision_launching_seconds_total"),
    }


class Taken(NamedTuple):
    """A run as it was counted, what the GPUs drew in its steady part, and what else belongs to its figures."""

    run: counting.Run
    power: Draw | None
    notes: dict[str, object]
    steady: list[Answered]


def take(asker: Asker, processes: int, gpus: Sequence[str] = (), metrics: Sequence[str] = (), least: int = 0) -> Taken:
    """Runs one workload as :func:`drive` does, ``least`` steady answers or as many as the rule, or it, has."""
    concurrency, least = asker.workload.concurrency, max(least, asker.workload.least)
    taken = drive(asker.prepare, concurrency, counting.requests(concurrency, least), processes, gpus, metrics)
    about = {"seed": asker.seed, "first_picture": first_picture(asker.workload, asker.seed)}
    return taken._replace(notes=about | taken.notes)


def drive(
    prepare: closed_loop.Prepare,
    concurrency: int,
    requests: int,
    processes: int,
    gpus: Sequence[str] = (),
    metrics: Sequence[str] = (),
) -> Taken:
    """Runs a closed loop and counts it.

    Args:
        processes: of the load.
        gpus: whose watts are read.
        metrics: the servers' metrics pages; without them nothing is noted of how they did.
    """
    before = [counted(url) for url in metrics]
    with GpuPower(gpus) as power:
        began, answers = closed_loop.run(prepare, concurrency, requests, processes)
    run = counting.count(began, answers, concurrency)
    after = [counted(url) for url in metrics]
    notes = server_notes(before, after, answers[-1].ended - began) if metrics else {}
    return Taken(run, power.between(run.began, run.ended), notes, counting.steady_part(answers, concurrency))
