"""Other engines beside ours, in turns (ours, theirs, ours, theirs, ...) on one GPU: the same pictures, exact
concurrency, one counting rule, watts and MHz (`make bench NAME=peers`).

    make bench NAME=peers ARGS="--engines vllm,lmdeploy --checkpoint DIR --env vllm=VENV --env lmdeploy=VENV2"
    python loadtest/bench peers --engines vllm --checkpoint loadtest/shapes/internvl3-8b-shape --weights random \\
        --workloads W1 W2 --form fp8 --instances preprocess=10 --turns 1
    python loadtest/bench peers --engines standin --gpus "" --workloads W1 --concurrency 4       a trial on the CPU

An engine lives in an environment of its own: `--env ENGINE=FOLDER` (a virtual environment), or its command is on PATH.
What is not installed, or does not start, is said, and its cells stay empty. Each is asked over its OpenAI server, ours
over gRPC. All servers run at once, each on the same share of the GPU's memory, and one at a time is asked. Random
weights are those of an engine's own dummy format; LMDeploy has none, so that it wants a checkpoint with weights.

Each pair is added to loadtest/results/peers.jsonl when it is taken; pairs of one version, commit and machine count
together, so that `--turns 1` several times is as good as `--turns 3`. In the end docs/peers.md and README.md's table
are written from that file, and the figures `peers.<engine>.<workload>.<form>.*` emitted, whose `ci95` is by the turns.
With `--flags ENGINE="..."` an engine gets more of its own options. On the CPU nothing is kept: figures are `trial.*`.
"""

import argparse
import datetime
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import counting
import figures
import report
import standin_server
from load import Target
from measuring import Taken, take
from serving import STOP_S, add_arguments, pairs, serve, setup, setup_notes
from workloads import WORKLOADS, Workload, shape_name

from bench import peers_report

OURS = "tessera"
START_S = 600.0
"""The most that an engine may take to start."""
STARTS_S = 150.0
"""About, of all at once on an H200."""
MEMORY = 0.92
"""Of a GPU, that all servers share alike."""


@dataclass(frozen=True)
class Engine:
    """How an engine's OpenAI server is started."""

    program: str
    """In its environment's bin."""
    arguments: tuple[str, ...]
    """With places for the checkpoint and the port."""
    package: str = ""
    """Whose version is told; none is needed where this is empty."""
    random_weights: tuple[str, ...] | None = None
    """None: it has none."""
    forms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What it is told for a form beside bf16."""
    share: str = ""
    """What its share of a GPU's memory is called."""


DUMMY, FP8 = ("--load-format", "dummy"), {"fp8": ("--quantization", "fp8")}
HERE = ("--host", "127.0.0.1", "--port", "{port}")
ENGINES = {
    "vllm": Engine(
        "vllm",
        ("serve", "{checkpoint}", *HERE, "--api-server-count", "8"),
        *("vllm", DUMMY, FP8, "--gpu-memory-utilization"),
    ),
    "sglang": Engine(
        "python",
        ("-m", "sglang.launch_server", "--model-path", "{checkpoint}", *HERE),
        *("sglang", DUMMY, FP8, "--mem-fraction-static"),
    ),
    "lmdeploy": Engine(
        "lmdeploy",
        ("serve", "api_server", "{checkpoint}", "--server-name", "127.0.0.1", "--server-port", "{port}"),
        "lmdeploy",
        share="--cache-max-entry-count",
    ),
    "standin": Engine(sys.executable, (standin_server.__file__, "openai", "{port}"), "", (), {"fp8": ()}),
}


@dataclass(frozen=True)
class Installed:
    """An engine that is there."""

    name: str
    program: str
    version: str

    def command(self, options: argparse.Namespace, port: int, share: float) -> list[str]:
        """``share``: of a GPU's memory. Raises ValueError for what it cannot do."""
        engine = ENGINES[self.name]
        weights = engine.random_weights if options.weights == "random" else ()
        if weights is None:
            raise ValueError(
                "it has no random weights: give --checkpoint a folder with weights, without --weights random"
            )
        if options.form != "bf16" and options.form not in engine.forms:
            raise ValueError(f"it does not make {options.form} of a checkpoint while loading")
        given = [each.format(checkpoint=options.checkpoint.resolve(), port=port) for each in engine.arguments]
        memory = [engine.share, f"{share:.2f}"] if engine.share else []
        more = pairs(options.flags, "ENGINE=FLAGS").get(self.name, "")
        return [self.program, *given, *weights, *memory, *engine.forms.get(options.form, ()), *shlex.split(more)]


def installed(name: str, environment: str | None) -> Installed:
    """Raises ValueError where it is not."""
    engine = ENGINES[name]
    program = shutil.which(engine.program, path=environment and str(Path(environment) / "bin"))
    if program is None:
        raise ValueError(
            f"there is no command {engine.program} {f'in {environment}/bin' if environment else 'on PATH'}"
        )
    if not engine.package:
        return Installed(name, program, "0")
    asks = f"import importlib.metadata as m; print(m.version({engine.package!r}))"
    asked = subprocess.run([str(Path(program).with_name("python")), "-c", asks], capture_output=True, text=True)
    if asked.returncode:
        raise ValueError(f"the Python beside {program} has no package {engine.package}")
    return Installed(name, program, asked.stdout.strip())


@contextmanager
def launched(command: Sequence[str], gpus: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An engine's server, which may be yet to come up."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": os.pathsep.join([str(Path(command[0]).parent), os.environ["PATH"]])}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with log.open("wb") as said:
        # Its stdin stays open: the stand-in ends with it. A group of its own: engines have processes of their own.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=said, stderr=said, env=environment, start_new_session=True
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(process: subprocess.Popen[bytes], port: int, log: Path, began: float) -> float:
    """Until a server is up; how many seconds it took. Raises RuntimeError with what it said last."""
    while not healthy(port):
        if process.poll() is not None or time.monotonic() - began > START_S:
            raise RuntimeError(f"it did not start: {' | '.join(log.read_text(errors='replace').splitlines()[-5:])}")
        time.sleep(0.2)
    return time.monotonic() - began


@contextmanager
def served(engines: Mapping[str, Installed], options: argparse.Namespace) -> Iterator[dict[str, Target]]:
    """Ours, and each engine that starts, by their names. What one says is kept in ``options.logs``."""
    share, gpus, began = MEMORY / (1 + len(engines)), options.ours.gpus, time.monotonic()
    settings = options.ours.settings | ({"gpu_memory": f"{share:.2f}"} if gpus else {})
    with ExitStack() as stack:
        starting = {}
        for name, engine in engines.items():
            port, log = free_port(), options.logs / f"{name}.log"
            process = stack.enter_context(launched(engine.command(options, port, share), gpus, log))
            starting[name] = process, port, log
        server = stack.enter_context(serve(replace(options.ours, settings=settings)))
        notes: dict[str, Any] = {"name": OURS, "startup_s": server.startup_s}
        targets = {OURS: Target(OURS, server.grpc, None, gpus, server.metrics, notes)}
        for name, (process, port, log) in starting.items():
            try:
                notes = {"name": name, "startup_s": wait_for(process, port, log, began)}
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            targets[name] = Target("openai", [f"127.0.0.1:{port}"], None, gpus, notes=notes)
        yield targets


def healthy(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        return answer.status == 200
    return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


Side = dict[str, Any]


def take_all(target: Target, options: argparse.Namespace, turn: int) -> dict[str, Side]:
    """Each workload of a server, as one side of a pair. In a turn all servers see the same pictures."""
    sides = {}
    for number, workload in enumerate(options.asked):
        seed = options.seed + 100 * turn + number
        taken = take(target.make(workload, seed), options.processes, target.gpus, target.metrics, options.least)
        sides[workload.name] = side(workload, taken) | {"startup_s": round(float(target.notes["startup_s"]), 1)}
        told = f"turn {turn + 1}, {target.notes['name']}, {workload.name}: {sides[workload.name]}"
        print(told, file=sys.stderr, flush=True)
    return sides


def side(workload: Workload, taken: Taken) -> Side:
    run = taken.run
    rates = (run.tokens_s, run.whole_tokens_s) if workload.streamed else (run.requests_s, run.whole_requests_s)
    found = {"rate": rates[0], "ci95": run.margin * rates[0], "whole": rates[1], "p99_over_p50": run.p99 / run.p50}
    if run.first_token_p50 is not None:
        found["ttft_p50_ms"] = 1e3 * run.first_token_p50
    if taken.power:
        found |= {"watts": taken.power.watts, "mhz": taken.power.mhz, "joules": taken.power.watts / run.requests_s}
    return {name: float(f"{value:.5g}") for name, value in found.items()}


def take_turn(
    targets: dict[str, Target], engines: Mapping[str, Installed], options: argparse.Namespace, turn: int
) -> Iterator[dict[str, Any]]:
    """Ours, then each engine: the pairs. An engine that fails is said, and taken out of ``targets``."""
    ours = take_all(targets[OURS], options, turn)
    for name in [name for name in targets if name != OURS]:
        try:
            theirs = take_all(targets[name], options, turn)
        except (RuntimeError, TimeoutError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            del targets[name]
            continue
        for workload in options.asked:
            yield {
                "engine": name,
                "version": engines[name].version,
                "workload": workload.name,
                "shape": shape_name(options.checkpoint),
                "form": options.form,
                "unit": "tok/s" if workload.streamed else "req/s",
                "ours": ours[workload.name],
                "theirs": theirs[workload.name],
                "machine": figures.machine(),
                "commit": figures.commit(),
                "date": datetime.date.today().isoformat(),
                **setup_notes(options),
                "flags": sorted(options.flags),
            }


def keep(pair: Mapping[str, Any], results: Path) -> None:
    """Adds a pair to the results as soon as it is there."""
    with results.open("a") as stream:
        stream.write(json.dumps(pair, separators=(",", ":")) + "\n")


def lasts(options: argparse.Namespace, engines: Sequence[str]) -> float:
    """About how many seconds on an H200: by our recorded rates, half as much again for others."""
    rates = {(each.newest["workload"], each.newest["form"]): each.all("ours")[-1] for each in peers_report.read()}
    load = 0.0
    for workload in options.asked:
        rate = rates.get((workload.name, options.form)) or rates.get((workload.name, "bf16")) or 20.0
        asked = counting.requests(workload.concurrency, max(options.least, workload.least))
        load += asked * (workload.tokens if workload.streamed else 1) / rate
    return STARTS_S + options.turns * load * (1 + 1.5 * len(engines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="vllm,sglang,lmdeploy", help=f"with commas between: {', '.join(ENGINES)}")
    parser.add_argument("--env", nargs="*", action="extend", default=[], metavar="ENGINE=FOLDER")
    parser.add_argument("--flags", nargs="*", action="extend", default=[], metavar="ENGINE=FLAGS")
    parser.add_argument("--form", choices=peers_report.FORMS, default="bf16", help="of the weights")
    parser.add_argument("--workloads", nargs="+", default=["W1", "W4a", "W4b"], choices=WORKLOADS)
    parser.add_argument("--turns", type=int, default=3, help="two or more for an interval")
    add_arguments(parser)
    parser.add_argument("--processes", type=int, default=6, help="of the load generator")
    parser.add_argument("--concurrency", type=int, help="instead of the workload's own: on the CPU")
    parser.add_argument("--least", type=int, default=0, help="steady answers, where the rule has fewer")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="of the pictures")
    parser.add_argument("--results", type=Path, default=peers_report.RESULTS, metavar="FILE.jsonl")
    options = parser.parse_args()
    options.asked = [WORKLOADS[name] for name in options.workloads]
    options.asked = [replace(each, concurrency=options.concurrency or each.concurrency) for each in options.asked]
    options.ours = setup(options)
    if options.form != "bf16":
        options.ours = replace(options.ours, settings={"quantization": options.form, **options.ours.settings})
    if len(options.ours.gpus) > 1:
        raise SystemExit("peers: one GPU: other engines would not use more by these commands")
    if options.ours.gpus and options.concurrency:
        raise SystemExit("peers: --concurrency is for trials on the CPU: a workload has its own")
    environments = pairs(options.env, "ENGINE=FOLDER")
    engines: dict[str, Installed] = {}
    for name in options.engines.split(","):
        if name not in ENGINES:
            raise SystemExit(f"peers: no engine {name!r}; there are {', '.join(ENGINES)}")
        try:
            found = installed(name, environments.get(name))
            found.command(options, 0, 0.0)
            engines[name] = found
        except ValueError as error:
            print(f"{name} is left out, its cells stay empty: {error}", file=sys.stderr)
    print(f"about {lasts(options, list(engines)) / 60:.0f} minutes on an H200", file=sys.stderr, flush=True)
    trial = not options.ours.gpus
    with tempfile.TemporaryDirectory(prefix="tessera-peers-") as folder:
        options.logs = Path(folder)
        results = options.logs / "trial.jsonl" if trial else options.results
        new: list[dict[str, Any]] = []
        if engines:
            with served(engines, options) as targets:
                for turn in range(options.turns):
                    if len(targets) > 1:  # those that fail are left out of the turns after
                        for pair in take_turn(targets, engines, options, turn):
                            keep(pair, results)
                            new.append(pair)
        standings = peers_report.read(results)
    of_one = "engine", "version", "workload", "shape", "form"
    told = {tuple(pair[key] for key in of_one) for pair in new}
    for each in standings:
        if tuple(each.newest[key] for key in of_one) in told:
            for name, value, unit, notes in each.figures():
                figures.emit("trial." * trial + name, value, unit, **notes)
    print(peers_report.page(standings), file=sys.stderr)
    if not trial and options.results == peers_report.RESULTS:
        report.update()
    return 0 if new else 1
