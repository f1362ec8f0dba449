"""One load for us and for any server of OpenAI's API: the same pictures, exactly as many requests in flight as is said,
one rule of counting (counting.py), and figures that say how sure they are (`ci95`) (`make bench NAME=load`).

    python loadtest/load.py --workloads W1 W2 W3 W4a W4b W6 W6.text_first --gpus 0 --instances preprocess=10 \\
        --checkpoint loadtest/shapes/internvl3-8b-shape --weights random             starts `tessera serve` and asks it
    python loadtest/load.py --target openai --url http://localhost:8000 --label vllm-0.33 --workloads W1 W4a
    python loadtest/load.py --ceiling [--target openai] --workloads W1 --least 5000  what this load can do at most

With the options of the first, in place of its workloads:

    --sweep concurrency|size|length    1..512 in flight; pictures of 224..3840 pixels a side; answers of 1..512 tokens;
                                       all streamed, one figure with all points
    --mix                              an open loop (open_loop.py) of 98 % short answers: the highest rate at which
                                       their p99 is at most 2 s, and then 80 % of it

How long it takes on an H200, and half a minute for the server's start: a workload 10 to 100 s (7.5 rounds of its
concurrency), the seven above 5 minutes; a sweep about 3 minutes, after `--minutes` it begins no other point; `--mix` at
most (trials + 1) x (seconds + 30) s, 8 minutes as it is set. A request that is not answered in 500 s (in the mix 20 s)
fails, and ends all but the mix.

The figures' names begin with `openai` where an OpenAI server was asked, and with `serve`, `docs`, `sweep` or
`open_loop` where our own was, over gRPC; after the workload stands `--label`'s name. W7 and W8 are asked of models
of any shape: those of a server that is started here name the checkpoint's folder, others by `--label` alone.

`--tree DIR` runs the server of another checkout under the same load, for pairs.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import counting
import figures
import open_loop
from closed_loop import PATIENCE_S
from measuring import report, take
from serving import add_arguments, serve, setup, setup_notes
from standin_server import standin
from targets import Asker, OpenAiAsker, TesseraAsker
from workloads import WORKLOADS, Workload

MIX_PATIENCE_S = 20.0
SHARE = 0.8
"""Of the highest rate of the mix: what a server is left with that is not driven to its limit."""


@dataclass(frozen=True)
class Axis:
    """What a sweep changes: to which values, how, and how many requests are in flight meanwhile."""

    unit: str
    values: tuple[int, ...]
    change: Callable[[Workload, int], Workload]
    concurrency: int = 0


DOUBLED = tuple(2**power for power in range(10))
AXES = {
    "concurrency": Axis("in flight", DOUBLED, lambda workload, value: replace(workload, concurrency=value)),
    "size": Axis(
        "pixels a side",
        (224, 448, 672, 896, 1344, 1920, 2688, 3840),
        lambda workload, value: replace(workload, width=value, height=value),
        concurrency=32,
    ),
    "length": Axis("tokens", DOUBLED, lambda workload, value: replace(workload, tokens=value), concurrency=64),
}


@dataclass(frozen=True)
class Target:
    """Who is asked: servers of this kind (tessera, openai) at these addresses, and what belongs to their figures."""

    kind: str
    addresses: list[str]
    model: str | None = None
    gpus: tuple[str, ...] = ()
    metrics: list[str] = field(default_factory=list)
    notes: dict[str, object] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """What the figures' names begin with."""
        return "openai." if self.kind == "openai" else ""

    def make(self, workload: Workload, seed: int, patience_s: float = PATIENCE_S) -> Asker:
        """What asks them a workload."""
        if self.kind == "openai":
            return OpenAiAsker(self.addresses, workload, seed, patience_s, self.model)
        return TesseraAsker(self.addresses, workload, seed, patience_s)


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that :func:`reached` reads."""
    parser.add_argument("--target", choices=("tessera", "openai"), default="tessera")
    parser.add_argument("--url", help="of a server that runs (tessera: its gRPC); several with commas between")
    parser.add_argument("--model", help="of the openai target; default: the first that it names")
    parser.add_argument("--ceiling", action="store_true", help="ask servers that do nothing (standin_server.py)")
    add_arguments(parser)


@contextmanager
def reached(options: argparse.Namespace) -> Iterator[Target]:
    """The target, ready to be asked."""
    asked = setup(options)
    with ExitStack() as stack:
        if options.ceiling:
            # One for each process of the load, so that they are not what is measured.
            addresses = [stack.enter_context(standin(options.target)) for _ in range(options.processes)]
            yield Target(options.target, addresses)
        elif options.url:
            addresses = [authority(url) for url in options.url.split(",")]
            yield Target(options.target, addresses, options.model, asked.gpus)
        elif options.target == "openai":
            raise SystemExit("--target openai wants the server's --url; `tessera serve` has one with --openai-port")
        else:
            server = stack.enter_context(serve(asked))
            notes = setup_notes(options) | {"gpus": len(asked.gpus), "startup_s": server.startup_s}
            yield Target("tessera", server.grpc, None, asked.gpus, server.metrics, notes)


def authority(url: str) -> str:
    """``host:port`` of ``http://host:port/v1``. Raises SystemExit for another scheme."""
    scheme, separator, rest = url.rpartition("://")
    if separator and scheme != "http":
        raise SystemExit(f"expected http://HOST:PORT or HOST:PORT, got {url}")
    return rest.removesuffix("/").removesuffix("/v1")


def run_workloads(target: Target, options: argparse.Namespace, label: str, seed: int) -> None:
    """Each of the workloads, one after the other."""
    if options.concurrency:
        label = f"c{options.concurrency}" + f".{label}" * (label != "bf16")
    for name in options.workloads:
        workload = WORKLOADS[name]
        workload = replace(workload, concurrency=options.concurrency or workload.concurrency)
        # No two workloads share pictures, which the server would know by then.
        asker = target.make(workload, seed + list(WORKLOADS).index(name))
        taken = take(asker, options.processes, target.gpus, target.metrics, options.least)
        ours = None if options.ceiling or options.url else options.checkpoint
        name_of_figures = target.prefix + workload.figure(label, ours)
        report(workload, taken.run, taken.power, name_of_figures, **taken.notes, **target.notes)
        print(f"{name} is done", file=sys.stderr, flush=True)


def run_sweep(target: Target, options: argparse.Namespace, label: str, seed: int) -> None:
    """One figure, the highest rate, with all points."""
    axis, base = AXES[options.sweep], WORKLOADS[options.workloads[0]]
    base = replace(base, concurrency=options.concurrency or axis.concurrency, always_streamed=True)
    points: list[dict[str, Any]] = []
    over = time.monotonic() + 60 * options.minutes
    for number, value in enumerate(options.values or axis.values):
        if time.monotonic() > over:
            print(f"{options.minutes:g} minutes are over before {value} {axis.unit}", file=sys.stderr, flush=True)
            break
        workload = axis.change(base, value)
        asker = target.make(workload, seed + number)
        run, power, _, _ = take(asker, options.processes, target.gpus, least=options.least or 100)
        points.append(
            {
                options.sweep: value,
                "req_s": round(run.requests_s, 3),
                "tok_s": round(run.tokens_s, 1),
                "ci95": round(run.margin * run.requests_s, 3),
                "p50_ms": round(1e3 * run.p50, 1),
                "p99_ms": round(1e3 * run.p99, 1),
                "ttft_p50_ms": round(1e3 * (run.first_token_p50 or 0.0), 1),
                **({"joules": round(power.watts / run.requests_s, 3)} if power else {}),
            }
        )
        print(points[-1], file=sys.stderr, flush=True)
    rate, unit = ("tok_s", "tok/s") if options.sweep == "length" else ("req_s", "req/s")
    name = f"{target.prefix}sweep.{options.sweep}.{base.name}.{label}"
    highest = max(point[rate] for point in points)
    figures.emit(f"{name}.{rate}", highest, unit, points=points, seed=seed, **target.notes)


def run_mix(target: Target, options: argparse.Namespace, label: str, seed: int) -> None:
    """The highest rate that keeps p99 of short answers, and what they take at a share of it."""
    tried: list[dict[str, object]] = []

    def trial(rate: float) -> open_loop.Counted:
        # Always the same schedule, never the same pictures.
        asker = target.make(open_loop.W1, seed + len(tried), patience_s=MIX_PATIENCE_S)
        due = open_loop.arrivals(rate, options.seconds, options.schedule_seed)
        run = open_loop.count(rate, options.seconds, open_loop.run(asker, due, options.processes))
        tried.append(run.notes)
        print(run.notes, *set(run.errors[:3]), file=sys.stderr, flush=True)
        return run

    best = open_loop.highest(trial, options.rate, options.trials)
    name = f"{target.prefix}open_loop.mix" + f".{label}" * (label != "bf16")
    told = {"seconds": options.seconds, "schedule_seed": options.schedule_seed, "seed": seed, **target.notes}
    gpus = max(1, len(target.gpus))
    figures.emit(f"{name}.req_s", round(best.rate / gpus, 2), "req/s", **told, trials=tried)
    run = trial(SHARE * best.rate)
    if run.errors:
        raise RuntimeError(f"{len(run.errors)} requests failed at {run.rate:.4g} a second: {run.errors[0]}")
    windows = [open_loop.milliseconds(window) for window in run.windows]
    told |= run.notes | {"kinds": run.kinds, "p99_ms_of_windows": windows}
    if len(windows) == counting.WINDOWS:
        told["ci95"] = open_loop.milliseconds(counting.margin(run.windows))
    figures.emit(f"{name}.p99_ms", open_loop.milliseconds(run.p99), "ms", **told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target_arguments(parser)
    parser.add_argument("--workloads", nargs="+", default=["W1"], choices=sorted(WORKLOADS))
    parser.add_argument("--sweep", choices=AXES, help="of the first of the workloads")
    parser.add_argument("--values", nargs="*", type=int, help="of the sweep, instead of its own")
    parser.add_argument("--minutes", type=float, default=7.0, help="after which a sweep begins no other point")
    parser.add_argument("--mix", action="store_true", help="the open loop")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second that the search begins with")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of its runs")
    parser.add_argument("--trials", type=int, default=7, help="at most")
    parser.add_argument("--schedule-seed", type=int, default=15, help="of the times at which requests are due")
    parser.add_argument("--processes", type=int, default=6, help="of the load generator")
    parser.add_argument("--concurrency", type=int, help="instead of the workload's own")
    parser.add_argument("--least", type=int, default=0, help="steady answers, where the rule has fewer; sweeps: 100")
    parser.add_argument("--seed", type=int, help="of the pictures; default: a new one")
    parser.add_argument("--label", help="default: bf16, or cpu, or ceiling")
    options = parser.parse_args()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    kind = run_mix if options.mix else run_sweep if options.sweep else run_workloads
    with reached(options) as target:
        gpus = f".{len(target.gpus)}gpus" * (len(target.gpus) > 1)
        label = options.label or ("ceiling" if options.ceiling else "bf16" if options.gpus else "cpu")
        kind(target, options, label + gpus + ".no_mps" * options.no_mps, seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
