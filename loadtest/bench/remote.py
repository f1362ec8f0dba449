"""The vision stage on a server of its own, with TCP_NODELAY and without, beside all stages on one server
(`make bench NAME=remote`; docs/remote_vision.md). W5b, whose small pictures make the most messages.

All of it runs at once, on shares of the memory, and is asked in turns: `one` is a server with all stages; `nodelay` a
server whose `vision_url` names another; `delay` the same two with Nagle's algorithm on at both ends of their
connection. No setting of ours or of gRPC's does that: `nagle.c` is loaded into both; the run fails if it did nothing.

    python loadtest/bench remote --gpus 0                      both on one GPU
    python loadtest/bench remote --gpus 0,1                    the vision stage alone on the second
    python loadtest/bench remote --gpus 0 --eyes cpu           ... or on the CPU
    python loadtest/bench remote --gpus "" --checkpoint build/default_model/checkpoint --concurrency 8 --turns 2
                                                               a trial on the CPU: `trial.seeds.*`

Figures: `seeds.nodelay.over_delay`, `seeds.separate.over_one` (requests a second of the first over the second),
`seeds.separate.<way>.req_s` and `.p99_ms`. On an H200 a way's start takes some 40 s and a run 15: three ways and five
turns six minutes.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import figures
from serving import Setup, serve
from turns import in_turns, report_ratio, report_way
from workloads import WORKLOADS

SHAPE = figures.ROOT / "loadtest" / "shapes" / "mineru25-shape"
SOURCE = Path(__file__).with_name("nagle.c")
ONE, NODELAY, DELAY = "one", "nodelay", "delay"
TRITON, STUB = "tritonserver", "triton_python_backend_stub"
MEMORY, OF_ONE = 0.85, 0.4
"""Of a GPU, for all servers on it, and for the one with all stages, which divides its own."""


@dataclass(frozen=True)
class Places:
    """GPUs of the language model and of the separate vision stage; () is the CPU."""

    body: tuple[str, ...]
    eyes: tuple[str, ...]

    @classmethod
    def of(cls, gpus: str, eyes: str) -> Places:
        first, *rest = filter(None, gpus.split(",")) if gpus else ("",)
        body = (first,) if first else ()
        return cls(body, () if eyes == "cpu" else tuple(rest[:1]) or body)

    def words(self) -> str:
        if not self.body:
            return "all on the CPU"
        if not self.eyes:
            return "the vision stage on the CPU"
        return "one GPU" if self.eyes == self.body else "a GPU each"

    def shares(self, ways: list[str]) -> dict[str, float]:
        """Of its GPU's memory, what the server with all stages, one with a vision_url and one with the vision stage
        alone may use."""
        pairs = len({*ways} - {ONE})
        left = MEMORY - OF_ONE * (ONE in ways)
        together = self.eyes == self.body
        body = left / max(1, pairs * (1 + together))
        eyes = body if together else MEMORY / max(1, pairs)
        return {"one": OF_ONE, "body": round(body, 3), "eyes": round(eyes, 3)}


def built(folder: Path) -> Path:
    """nagle.c as a library."""
    library = folder / "nagle.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return library


def start(way: str, stack: ExitStack, setup: Setup, places: Places, shares: Mapping[str, float]) -> list[str]:
    """A way's servers, ready; the addresses that are asked."""

    def placed(what: str, gpus: tuple[str, ...], only: str = "") -> Setup:
        share = {"gpu_memory": str(shares[what])} if gpus else {}
        return replace(setup, gpus=gpus, settings=share, only=only)

    if way == ONE:
        return stack.enter_context(serve(placed("one", places.body))).grpc
    eyes, body = placed("eyes", places.eyes, "vision_encoder"), placed("body", places.body)
    logs: list[Path] = []
    if way == DELAY:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tessera-nagle-")))
        logs = [folder / "eyes", folder / "body"]
        loaded = {"LD_PRELOAD": str(built(folder))}
        # What asks is the vision stage's own process; connections of that server's clients stay as they are.
        eyes, body = (
            replace(each, environment=loaded | {"NAGLE_LOG": str(log), "NAGLE_PROGRAM": program})
            for each, log, program in zip((eyes, body), logs, (TRITON, STUB))
        )
    (url,) = stack.enter_context(serve(eyes)).grpc
    body = replace(body, settings={**body.settings, "vision_encoder.vision_url": url})
    stack.callback(check, logs)
    return stack.enter_context(serve(body)).grpc


def check(logs: list[Path]) -> None:
    """Raises RuntimeError where one of the servers left no socket without TCP_NODELAY."""
    for log in logs:
        if not log.exists():
            raise RuntimeError(f"{log.name}: {SOURCE.name} was not in force")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="0", help="of the language model and of the vision stage; empty for the CPU")
    parser.add_argument("--eyes", choices=("gpu", "cpu"), default="gpu", help="where the separate vision stage runs")
    parser.add_argument("--ways", nargs="+", choices=(ONE, NODELAY, DELAY), default=[ONE, NODELAY, DELAY])
    parser.add_argument("--checkpoint", type=Path, default=SHAPE)
    parser.add_argument("--no-mps", action="store_true", help="no server has an MPS daemon")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=WORKLOADS["W5b"].concurrency)
    parser.add_argument("--least", type=int, default=0, help="steady answers, where the rule has fewer")
    parser.add_argument("--processes", type=int, default=6, help="of the load generator")
    options = parser.parse_args()
    places = Places.of(options.gpus, options.eyes)
    recorded = bool(places.body) and options.checkpoint.resolve() == SHAPE
    random_weights = options.checkpoint.resolve() == SHAPE
    setup = Setup(options.checkpoint, random_weights=random_weights, mps=not options.no_mps)
    workload = replace(WORKLOADS["W5b"], concurrency=options.concurrency)
    runs_s = len(options.ways) * (40 + 15 * options.turns)
    print(f"{places.words()}: about {runs_s / 60:.0f} minutes on an H200", file=sys.stderr, flush=True)
    with ExitStack() as stack:
        shares = places.shares(options.ways)
        ways = {way: start(way, stack, setup, places, shares) for way in options.ways}
        runs = in_turns(ways, workload, options.turns, options.processes, random.randrange(1 << 20), options.least)
    prefix, about = "trial." * (not recorded) + "seeds", {"places": places.words(), "concurrency": options.concurrency}
    for way, taken in runs.items():
        report_way(f"{prefix}.separate.{way}", taken, **about)
    for name, above, below in (("nodelay.over_delay", NODELAY, DELAY), ("separate.over_one", NODELAY, ONE)):
        if above in runs and below in runs:
            report_ratio(f"{prefix}.{name}", runs[above], runs[below], **about)
    return 0
