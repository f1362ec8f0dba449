"""What drafts gain and cost, and that they change no answer: each part with drafts and without (`make bench
NAME=drafts`; docs/drafts.md).

    python loadtest/bench drafts json          answers by one JSON schema, 10 and 64 in flight: `drafts.json.c10.ratio`
    python loadtest/bench drafts off_cost      W4a and W4b with a draft of which nothing is right: `drafts.off_cost.*`
    python loadtest/bench drafts exact         the same requests, token by token: `drafts.differences.*`
    python loadtest/bench drafts parse         `tessera parse` with the default document model: `drafts.cpu.pages.ratio`
    python loadtest/bench drafts ceiling       what that could be at most
    python loadtest/bench drafts acceptance    what the text layers of pages say rightly, and drafts.zip for the next:
                                               the pages and the model's answers
    python loadtest/bench drafts replay        pages of MinerU2.5's shape with these answers: `drafts.pages.c10.ratio`

`json` and `off_cost` are of InternVL3-8B's shape with random weights, which write whatever the schema leaves free: two
servers side by side on shares of a GPU, in turns until the ratio is known; no turn begins after `--seconds`. With
`--below TREE` the server below is that checkout's. `exact` starts one server after the other, for each of `--places`.
`parse`, `ceiling`, `acceptance` and the place `pages` read pages.pdf, which `drafts_pages` makes, and refuse another.
On the CPU (`--gpus ""`) figures are `trial.*`, but those of these three, which are of the default document model.

On an H200 `json` and `off_cost` take 5 to 7 minutes, `exact` 3 a place, `acceptance` 3, `replay` 6 for each of
`--kinds`, or as long as `--seconds` lets it; `parse` takes 10 on two cores.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

import figures
from gpu_power import Draw
from measuring import Taken, take
from serving import Running, Setup, add_arguments, serve, setup, setup_notes
from targets import TesseraAsker
from turns import GOAL, Comparison, compare
from workloads import WORKLOADS, Pictures, Workload

from tessera_client import Answer, Client

SHAPE, MINERU = (figures.ROOT / "loadtest" / "shapes" / name for name in ("internvl3-8b-shape", "mineru25-shape"))
DOCUMENTS = figures.ROOT / "build" / "document_model" / "checkpoint"
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
    given, off = setup(options), {"language_model.drafts": "0"}
    shape = given.random_weights or not [*checkpoint.glob("*.safetensors")]
    above = replace(given, checkpoint=checkpoint, random_weights=shape, settings={**settings, **given.settings})
    if options.below:
        return above, replace(above, tree=options.below.resolve())
    return above, replace(above, settings=above.settings | off)


@contextmanager
def both(
    options: argparse.Namespace, checkpoint: Path, repository: Path | None = None
) -> Iterator[tuple[Running, Running]]:
    """The two servers side by side, with drafts and without, each on a share of a GPU's memory."""
    with ExitStack() as stack:
        setups = drafting(options, checkpoint, {"gpu_memory": "0.46"} if options.gpus else {})
        on, off = (stack.enter_context(serve(replace(each, repository=repository))) for each in setups)
        yield on, off


def turns(
    options: argparse.Namespace,
    servers: tuple[Running, Running],
    asked: Mapping[str, Callable[[Running, int], Any]],
    worth: Callable[[Any], float] = lambda taken: taken.run.requests_s,
    goal: float = GOAL,
) -> dict[str, Comparison]:
    """What is asked, with drafts over without, by a server and the seed of a turn."""
    compared = {name: Comparison(*(partial(ask, each) for each in servers), worth) for name, ask in asked.items()}
    compare(compared, options.seconds, goal)
    return compared


def figure_name(options: argparse.Namespace, name: str) -> str:
    """With what it was compared with, and on what, where that is not usual."""
    over = f".over_{options.below.resolve().name}" if options.below else ""
    return "trial." * (not options.gpus) + f"drafts.{name}" + f".{options.label}" * bool(options.label) + over


def emit(options: argparse.Namespace, name: str, found: Comparison, **notes: Any) -> None:
    """The ratio; `rates`: by turns, without drafts first. A cost is in % of the rate."""
    ratio, rates = found.ratio, [[round(found.worth(told), 4) for told in side] for side in zip(*found.turns)]
    notes |= {"turns": len(found.turns), "rates": rates, **setup_notes(options)}
    if all(isinstance(told, Taken) for turn in found.turns for told in turn):
        for what in ("steps_s", "held_up", "launching"):
            notes[what] = [round(fmean(told.notes[what] for told in side), 4) for side in zip(*found.turns)]
        if all(told.power for turn in found.turns for told in turn):
            for what in Draw._fields:
                notes[what] = [
                    round(fmean(getattr(told.power, what) for told in side), 2) for side in zip(*found.turns)
                ]
    value, ci95, unit = round(ratio.value, 4), round(ratio.ci95, 4), "ratio"
    if name.startswith("off_cost"):
        value, ci95, unit = round(100 / ratio.value - 100, 3), round(100 * ratio.share, 3), "%"
    figures.emit(name if name.startswith("drafts.") else figure_name(options, name), value, unit, ci95=ci95, **notes)


def ask(options: argparse.Namespace, workload: Workload, server: Running, seed: int) -> Taken:
    workload = replace(workload, concurrency=options.in_flight or workload.concurrency)
    return take(TesseraAsker(server.grpc, workload, seed), options.processes, setup(options).gpus, server.metrics)


def run_json(options: argparse.Namespace) -> None:
    checkpoint = options.checkpoint or SHAPE
    with both(options, checkpoint) as servers:
        jobs = {f"json.{load}": replace(JSON, concurrency=int(load[1:])) for load in options.loads or ("c10", "c64")}
        asked = {name: partial(ask, options, job) for name, job in jobs.items()}
        compared = turns(options, servers, asked, goal=GOAL / 2)
        with Client(servers[0].grpc) as client:
            pictures = Pictures(JSON, random.randrange(1 << 30))
            told = [client.ask(pictures.deal(), ASKED, logprobs=0, **JSON.sampling) for _ in range(8)]
        notes = forced(checkpoint, told)
        for name, found in compared.items():
            emit(options, f"{name}.ratio", found, **notes)
            first = ask(options, replace(jobs[name], tokens=1), servers[0], random.randrange(1 << 30)).run.requests_s
            ceiling = first / fmean(taken.run.requests_s for taken, _ in found.turns)
            figures.emit(figure_name(options, f"{name}.ceiling"), round(ceiling, 4), "ratio")


def forced(checkpoint: Path, answers: Sequence[Answer]) -> dict[str, int]:
    """How many tokens the answers have, and for how many of these the grammar leaves no choice."""
    import numpy as np

    from tessera.engine.structured_output.constraints import Constraints
    from tessera.models.registry import read_config
    from tessera.prompt.prompt import stop_token_ids
    from tessera.prompt.sampling import SamplingParameters
    from tessera.prompt.tokenizer import Tokenizer

    config, tokenizer = read_config(checkpoint), Tokenizer.from_folder(checkpoint)
    constraints = Constraints(tokenizer, config.text.vocab_size, stop_token_ids(config, tokenizer))
    count = {"tokens": 0, "forced": 0}
    for answer in answers:
        matcher = constraints.matcher(SamplingParameters.parse({"json_schema": SCHEMA}))
        for entry in answer.logprobs:
            count["tokens"] += 1
            count["forced"] += int(np.unpackbits(matcher.mask).sum()) == 1
            matcher.advance(entry["token_id"])
    return count


def run_off_cost(options: argparse.Namespace) -> None:
    with both(options, options.checkpoint or SHAPE) as servers:
        jobs = {name: Job(**vars(WORKLOADS[name]), more={"draft": WRONG}) for name in ("W4a", "W4b")}
        asked = {name: partial(ask, options, job) for name, job in jobs.items()}
        for name, found in turns(options, servers, asked, goal=GOAL / 4).items():
            emit(options, f"off_cost.{name}", found)


PARTS = {
    "json": ("bench.drafts", "run_json"),
    "off_cost": ("bench.drafts", "run_off_cost"),
    "exact": ("bench.drafts_exact", "run"),
    "parse": ("bench.drafts_documents", "run_parse"),
    "ceiling": ("bench.drafts_documents", "run_ceiling"),
    "acceptance": ("bench.drafts_documents", "run_acceptance"),
    "replay": ("bench.drafts_documents", "run_replay"),
}


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
    parser.add_argument(
        "--share", type=float, default=1.0, help="exact, parse, ceiling, acceptance: of the requests or pages"
    )
    parser.add_argument("--pages", type=Path, default=Path("pages.pdf"), help="what drafts_pages makes")
    parser.add_argument("--accepted", type=Path, default=Path("drafts.zip"), help="what acceptance writes for replay")
    parser.add_argument("--loads", nargs="+", help="json: c10 or c64; replay: c10 or saturated; default: both")
    parser.add_argument("--perfect", action="store_true", help="replay: crops have their answers as drafts")
    parser.add_argument("--cut", action="store_true", help="replay: no proposal has a wrong token")
    parser.add_argument("--kinds", nargs="+", default=[""], help="replay: of crops, each alone; '': all of them")
    options = parser.parse_args()
    module, function = PARTS[options.part]
    return getattr(import_module(module), function)(options) or 0
