"""What drafts gain and cost, and that they change no answer: each part with drafts and without (`make bench
NAME=drafts`; docs/drafts.md).

    python loadtest/bench drafts json          answers by one JSON schema, 10 and 64 in flight: `drafts.json.c10.ratio`
    python loadtest/bench drafts off_cost      W4a and W4b with a draft of which nothing is right: `drafts.off_cost.*`
    python loadtest/bench drafts exact         the same requests, token by token: `drafts.differences.*`
    python loadtest/bench drafts parse         `tessera parse` with the default document model: `drafts.cpu.pages.ratio`
    python loadtest/bench drafts acceptance    what the text layers of pages say rightly, and drafts.zip for the next
    python loadtest/bench drafts replay        pages of MinerU2.5's shape, its drafts accepted as measured by the model
                                               before: `drafts.pages.c10.ratio`

`json` and `off_cost` are of InternVL3-8B's shape with random weights, two servers side by side on shares of a GPU, in
turns until the ratio is known; with `--below TREE` the server below is that checkout's. Random weights write whatever
the schema leaves free, up to maxLength. A token is forced where the grammar leaves one alone, and foreseen where the
library knows the text that must follow and the model writes it in the library's tokens. `exact` starts one server
after the other, for each of `--places`. On the CPU (`--gpus ""`) figures are `trial.*`, but those of `parse` and
`acceptance`, which are of the default document model.

Reads pages.pdf, which `drafts_pages` makes, and refuses another. How long each part takes on an H200 it says as it
begins; no turn begins after `--seconds`. `parse` takes 10 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

import figures
from measuring import Taken, take
from serving import Running, Setup, add_arguments, serve, setup, setup_notes
from targets import TesseraAsker
from turns import Comparison, compare
from workloads import WORKLOADS, Pictures, Workload

from tessera_client import Answer, Client

DRAFTS = "language_model.drafts"
MOST = "15"
"""Tokens of a draft."""
SHAPE = figures.ROOT / "loadtest" / "shapes" / "internvl3-8b-shape"
MINERU = figures.ROOT / "loadtest" / "shapes" / "mineru25-shape"
DOCUMENTS = figures.ROOT / "build" / "document_model" / "checkpoint"
MEMORY = 0.42
"""Of a GPU, for each of two servers."""
SCHEMA: dict[str, Any] = json.loads(Path(__file__).with_name("drafts_schema.json").read_text())
ASKED = "Write down what you see in this room."
WRONG = "The quick brown fox jumps over the lazy dog, and nobody in this picture has ever seen either of the two. " * 8
"""No answer has any of it."""


@dataclass(frozen=True)
class Job(Workload):
    """A workload with more sampling parameters."""

    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sampling(self) -> dict[str, Any]:
        return {name: value for name, value in (super().sampling | self.more).items() if value is not None}


JSON = Job("json", 448, 448, 512, 10, prompts=(ASKED,), more={"json_schema": SCHEMA, "ignore_eos": None})


def drafting(options: argparse.Namespace, checkpoint: Path, settings: Mapping[str, str] = {}) -> tuple[Setup, Setup]:
    """A server with drafts and one without, or that of another checkout; shapes have random weights."""
    given = setup(options)
    above = replace(
        given,
        checkpoint=checkpoint,
        random_weights=given.random_weights or checkpoint in (SHAPE, MINERU),
        settings={DRAFTS: MOST, **settings, **given.settings},
    )
    if not options.below:
        return above, replace(above, settings={**above.settings, DRAFTS: "0"})
    known = {name: value for name, value in above.settings.items() if name != DRAFTS}
    return above, replace(above, settings=known, tree=options.below.resolve())


@contextmanager
def both(
    options: argparse.Namespace, checkpoint: Path, repository: Path | None = None
) -> Iterator[tuple[Running, Running]]:
    """The two servers side by side, with drafts and without."""
    memory = {"gpu_memory": str(MEMORY)} if options.gpus else {}
    with ExitStack() as stack:
        each = (replace(one, repository=repository) for one in drafting(options, checkpoint, memory))
        on, off = (stack.enter_context(serve(one)) for one in each)
        yield on, off


def comparison(servers: tuple[Running, Running], ask: Callable[[Running, int], Taken]) -> Comparison:
    """Of answers a second; ``ask``: a server, with the pictures of a seed."""
    on, off = (partial(ask, server) for server in servers)
    return Comparison(on, off, lambda taken: taken.run.requests_s)


def ask(options: argparse.Namespace, workload: Workload, server: Running, seed: int) -> Taken:
    asker = TesseraAsker(server.grpc, workload, seed)
    return take(asker, options.processes, setup(options).gpus, server.metrics)


def figure_name(options: argparse.Namespace, name: str) -> str:
    """With what it was compared with, and on what, where that is not usual."""
    over = f".over_{options.below.resolve().name}" if options.below else ""
    return "trial." * (not options.gpus) + f"drafts.{name}" + f".{options.label}" * bool(options.label) + over


def both_ways(compared: Comparison) -> dict[str, Any]:
    """What belongs to a ratio: both ways' answers and tokens a second by turns, without drafts first."""
    sides = [[taken.run for taken in side] for side in zip(*compared.turns)]
    rates = {what: [[round(getattr(run, name), 2) for run in side] for side in sides]
             for what, name in (("answers_s", "requests_s"), ("tok_s", "tokens_s"))}  # fmt: skip
    return {"ci95": round(compared.ratio.ci95, 4), "turns": len(compared.turns), **rates}


def run_json(options: argparse.Namespace) -> None:
    with both(options, options.checkpoint or SHAPE) as servers:
        jobs = {f"c{n}": replace(JSON, concurrency=options.in_flight or n) for n in (10, 64)}
        compared = {name: comparison(servers, partial(ask, options, job)) for name, job in jobs.items()}
        compare(compared, options.seconds)
        with Client(servers[0].grpc) as client:
            pictures = Pictures(JSON, random.randrange(1 << 30))
            answers = [client.ask(pictures.deal(), ASKED, logprobs=0, **JSON.sampling) for _ in range(8)]
        notes = forced(options.checkpoint or SHAPE, answers) | setup_notes(options)
        for name, found in compared.items():
            first = ask(options, replace(jobs[name], tokens=1), servers[0], random.randrange(1 << 30))
            below = fmean(taken.run.requests_s for taken, _ in found.turns)
            notes["in_flight"] = jobs[name].concurrency
            ratio, ceiling = round(found.ratio.value, 4), round(first.run.requests_s / below, 4)
            figures.emit(figure_name(options, f"json.{name}.ratio"), ratio, "ratio", **notes, **both_ways(found))
            figures.emit(figure_name(options, f"json.{name}.ceiling"), ceiling, "ratio")


def forced(checkpoint: Path, answers: Sequence[Answer]) -> dict[str, int]:
    """How many of the answers' tokens the grammar leaves no choice, and how many the library foresees."""
    import numpy as np

    from tessera.engine.structured_output.constraints import Constraints
    from tessera.models.registry import read_config
    from tessera.prompt.prompt import stop_token_ids
    from tessera.prompt.sampling import SamplingParameters
    from tessera.prompt.tokenizer import Tokenizer

    config, tokenizer = read_config(checkpoint), Tokenizer.from_folder(checkpoint)
    constraints = Constraints(tokenizer, config.text.vocab_size, stop_token_ids(config, tokenizer))
    count = {"tokens": 0, "forced": 0, "foreseen": 0}
    for answer in answers:
        matcher = constraints.matcher(SamplingParameters.parse({"json_schema": SCHEMA}))
        for entry in answer.logprobs:
            count["tokens"] += 1
            count["forced"] += int(np.unpackbits(matcher.mask).sum()) == 1
            count["foreseen"] += matcher._matcher.compute_ff_tokens()[:1] == [entry["token_id"]]
            matcher.advance(entry["token_id"])
    return count


def run_off_cost(options: argparse.Namespace) -> None:
    with both(options, options.checkpoint or SHAPE) as servers:
        jobs = {name: Job(**vars(WORKLOADS[name]), more={"draft": WRONG}) for name in ("W4a", "W4b")}
        if options.in_flight:
            jobs = {name: replace(job, concurrency=options.in_flight) for name, job in jobs.items()}
        compared = {name: comparison(servers, partial(ask, options, job)) for name, job in jobs.items()}
        compare(compared, options.seconds)
        for name, found in compared.items():
            cost, about = 100 * (1 / found.ratio.value - 1), both_ways(found) | setup_notes(options)
            about["ci95"] = round(100 * found.ratio.share, 3)
            figures.emit(figure_name(options, f"off_cost.{name}"), round(cost, 3), "%", **about)


PARTS = {
    "json": ("bench.drafts", "run_json", 240),
    "off_cost": ("bench.drafts", "run_off_cost", 300),
    "exact": ("bench.drafts_exact", "run", 120),
    "parse": ("bench.drafts_documents", "run_parse", 480),
    "acceptance": ("bench.drafts_documents", "run_acceptance", 180),
    "replay": ("bench.drafts_documents", "run_replay", 300),
}
"""Module, function, and about how many seconds it takes on an H200."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    add_arguments(parser)
    parser.set_defaults(checkpoint=None)
    parser.add_argument("--below", type=Path, metavar="TREE", help="a checkout whose server is compared with")
    parser.add_argument("--label", default="", help="of the weights, in the figures' names: bf16, fp8, w4a16")
    parser.add_argument("--in-flight", type=int, help="instead of a workload's own: on the CPU")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which no turn begins")
    parser.add_argument("--processes", type=int, default=6, help="of the load generator")
    parser.add_argument("--places", nargs="+", default=["rooms"], help="exact: rooms, small_pool, pages")
    parser.add_argument("--share", type=float, default=1.0, help="exact: of the requests")
    parser.add_argument("--pages", type=Path, default=Path("pages.pdf"), help="what drafts_pages makes")
    parser.add_argument("--count", type=int, default=200, help="parse, acceptance: pages that are read")
    parser.add_argument("--each", type=int, default=20, help="parse: pages of a turn")
    parser.add_argument("--accepted", type=Path, default=Path("drafts.zip"), help="acceptance writes it for replay")
    parser.add_argument("--tokenizer", type=Path, help="acceptance: a checkpoint's folder, for its vocabulary")
    parser.add_argument("--loads", nargs="+", default=["c10", "saturated"], help="replay")
    parser.add_argument("--kind", default="", help="replay: of crops, one alone")
    options = parser.parse_args()
    module, function, seconds = PARTS[options.part]
    print(f"about {seconds / 60:.0f} minutes on an H200, and the servers' start", file=sys.stderr, flush=True)
    return getattr(import_module(module), function)(options) or 0
