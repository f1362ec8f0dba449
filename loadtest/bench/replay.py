"""A replay of real documents without real weights: pages of PDFs as MinerU's client would ask about them (`make bench
NAME=replay`).

Each page is asked as `tessera parse` asks: the layout, then all its crops at once, with MinerU's prompts, sampling
parameters and pictures, by its system prompt. The weights are random, so that answers mean nothing; what the layout
finds and how long each answer is (`ignore_eos`) come from the set of pages, which `replay_pages` makes from the text
layers of PDFs. So speed is replayed, and nothing is said about what a model would read.

    python loadtest/bench replay replay.zip --gpus 0 \\
        --checkpoint loadtest/shapes/mineru25-shape --weights random --instances preprocess=10    ours, over gRPC
    python loadtest/bench replay replay.zip --gpus 0 --target openai --url http://localhost:8000 --label vllm-0.33

The second asks any server of OpenAI's API with the request that MinerU's own HTTP client writes; `--gpus` says whose
watts are read. Figures are `seeds.replay.*`, of others `openai.seeds.replay.<label>.*`, on the CPU `trial.*`.

Loads: `c10`, exactly 10 requests in flight, of 10 pages; `saturated`, 96 pages in flight, at most 256 of their
requests, as many as the engine runs at once; and, to say where a page's joules go, the saturated load's parts alone:
`layouts` and `crops`, whose answers have one token, so that they are the pictures and their prompts. `decode_joules` is
what is left of the whole, what parts gain or lose side by side included. Only where named: `pruned_crops` and `pruned`,
the saturated load without equal groups of patches in crops, or in all pictures. Loads that are named several times take
turns:

    python loadtest/bench replay replay.zip ... --loads saturated pruned_crops pruned saturated pruned_crops pruned

Pages are counted by the rule of counting.py, where concurrency is the number of pages, at least 200 of them a run;
requests, tokens and latencies are those of the steady part's pages. Answers are streamed, so that first tokens are
seen; with `--whole` they are asked for whole, as `tessera parse` does. Pictures are cut and encoded before the load
begins, and each time that one is sent it has a mark of its own, so that no cache knows it.
"""

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import hypot, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import closed_loop
import counting
import figures
import measuring
from closed_loop import Answered, Ask, Reply
from load import Target, add_target_arguments, reached
from measuring import Taken, drive
from targets import STREAMED, openai_chat, picture_part, reply_of
from tqdm import tqdm
from turns import ratio

from bench.replay_set import ReplaySet, Request, marked
from tessera_client import Client, Retry

LABEL = "a replay: true pages, crops and lengths, random weights"
LEAST = 200
"""Pages that a run reads."""


@dataclass(frozen=True)
class Load:
    """``pages`` are in flight at all times, and at most ``requests`` of theirs. ``part``: of a page that is asked."""

    name: str
    pages: int
    requests: int
    pace: float
    """Pages a second on an H200, about: for how long it will take."""
    part: str = ""
    kind: str = ""
    """Of the crops that are asked, where not all are."""
    pruned: str = ""
    """Which pictures are without equal groups of patches: crops, or all."""
    crops_end: bool = False
    """With their first token."""

    def prunes(self, number: int) -> bool:
        """Whether the picture of a page's request is; that of request 0 is the layout's."""
        return self.pruned == "all" or (self.pruned == "crops" and number > 0)


LOADS = {
    load.name: load
    for load in (
        Load("c10", 10, 10, pace=2),
        Load("saturated", 96, 256, pace=10),
        Load("layouts", 96, 256, pace=30, part="layouts"),
        Load("crops", 96, 256, pace=15, part="crops"),
        Load("pruned_crops", 96, 256, pace=10, pruned="crops"),
        Load("pruned", 96, 256, pace=10, pruned="all"),
    )
}

PRUNED_JOULES = {"pruned_crops": 57, "pruned": 48}
"""A page's that are aimed at."""

Chat = Callable[[list[dict[str, Any]], dict[str, Any]], Reply]
"""(a conversation in the SDK's words, its sampling parameters) -> the whole answer."""


@contextmanager
def connection(target: Target, whole: bool) -> Iterator[Chat]:
    """What asks the target, from any thread."""
    if target.kind == "openai":
        with openai_chat(target.addresses, target.model) as send:
            yield lambda messages, sampling: send(openai_request(messages, sampling) | ({} if whole else STREAMED))
        return
    with Client(target.addresses, timeout=closed_loop.PATIENCE_S, retry=Retry(attempts=1)) as client:
        chat = client.chat if whole else client.chat_stream
        yield lambda messages, sampling: reply_of(chat(messages, **sampling), sampling["max_tokens"])


def openai_request(messages: list[dict[str, Any]], sampling: dict[str, Any]) -> dict[str, Any]:
    """As MinerU's HTTP client writes it."""
    sampling = dict(sampling)
    xargs = {"no_repeat_ngram_size": size} if (size := sampling.pop("no_repeat_ngram_size", None)) is not None else {}
    system, user = messages
    content = [picture_part(part["image"], "png") if part["type"] == "image" else part for part in user["content"]]
    return {"messages": [system, user | {"content": content}], **sampling, **({"vllm_xargs": xargs} if xargs else {})}


def picture_file(folder: Path, page: int, request: int) -> Path:
    """Where the picture of a page's request lies once it is encoded."""
    return folder / f"{page}-{request}.png"


def encode(path: Path, folder: Path, page: int) -> None:
    """Writes a page's pictures."""
    pages = ReplaySet(path)
    picture = pages.picture(page)
    for number, request in enumerate(pages.pages[page].requests):
        picture_file(folder, page, number).write_bytes(pages.client.picture(picture, request))


def encode_all(path: Path, folder: Path, count: int) -> None:
    """All pages', on all cores."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(tqdm(pool.map(partial(encode, path, folder), range(count)), "cutting crops", count, unit="page"))


class Reader:
    """Asks servers about the pages of a set. All processes of a load have one together.

    Args:
        connect: to the servers.
        path, folder: the set, and its encoded pictures.
        load: which part of a page is asked, and how many requests may be in flight.
        seed: of the marks: no two runs with different ones send equal pictures.
    """

    def __init__(
        self, connect: Callable[[], AbstractContextManager[Chat]], path: Path, folder: Path, load: Load, seed: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connect, self._path, self._folder = connect, path, folder
        self._load, self._seed = load, seed
        self._begun: Any = context.Value("q", 0)
        self._slots: Any = context.Semaphore(load.requests)

    @contextmanager
    def prepare(self, number: int, stock: int) -> Iterator[Ask]:
        """For :func:`closed_loop.run`, whose requests are pages here."""
        pages = ReplaySet(self._path)
        with self._connect() as chat, ThreadPoolExecutor(self._load.requests) as pool:
            yield lambda: self._read(pages, chat, pool)

    def _read(self, pages: ReplaySet, chat: Chat, pool: ThreadPoolExecutor) -> Reply:
        """One page: its layout, then all its crops."""
        with self._begun.get_lock():
            turn = self._begun.value
            self._begun.value += 1
        ask, requests = partial(self._ask, pages, chat, turn), pages.pages[in_turn(turn, len(pages.pages))].requests
        asked = [number for number, each in enumerate(requests) if number and self._load.kind in ("", each.kind)]
        layout = [] if self._load.part == "crops" else [ask(0)]
        crops = [] if self._load.part == "layouts" else pool.map(ask, asked)
        answers = (*layout, *crops)
        tokens, parts = sum(answer.tokens for answer in answers), sum(answer.parts for answer in answers)
        return Reply(None, tokens, parts, made_of=answers)

    def _ask(self, pages: ReplaySet, chat: Chat, turn: int, number: int) -> Answered:
        page = in_turn(turn, len(pages.pages))
        request: Request = pages.pages[page].requests[number]
        if self._load.part or (number and self._load.crops_end):
            request = replace(request, tokens=1)
        picture = picture_file(self._folder, page, number).read_bytes()
        messages = pages.client.messages(request, marked(picture, f"{self._seed} {turn} {number}"))
        policy = {"tile_policy": {"prune": "equal"}} if self._load.prunes(number) else {}
        with self._slots:
            began = time.perf_counter()
            return Answered.of(chat(messages, pages.client.sampling(request) | policy), began)


def in_turn(turn: int, pages: int) -> int:
    """The page of a turn: each time through all of them in another order, the same in all runs."""
    order = list(range(pages))
    random.Random(turn // pages).shuffle(order)
    return order[turn % pages]


def pages_of_a_run(load: Load, pages: int) -> int:
    """How many make whole rounds (counting.py), at least five steady ones, and this many pages."""
    least = counting.requests(load.pages)
    return least + max(0, -(-(pages - least) // load.pages)) * load.pages


def first_token_ms(answer: Answered) -> float:
    """From sending to the first token, as the client saw it; by the server's own clock where it was not streamed."""
    return sum(answer.stages[:-1]) if answer.first_token is None else 1e3 * answer.first_token


def token_ms(answer: Answered) -> float:
    """For each token after the first."""
    spent = answer.stages[-1] if answer.first_token is None else 1e3 * (answer.seconds - answer.first_token)
    return spent / max(1, answer.tokens - 1)


def report(load: Load, taken: Taken, name: str, **notes: Any) -> None:
    """Emits the figures of a run; ``name`` is what their names begin with. The notes stand with its rate alone."""
    run, steady = taken.run, taken.steady
    answers = [answer for page in steady for answer in page.made_of]
    asked = [len(page.made_of) for page in steady]

    def p50(values: Sequence[float]) -> float:
        return round(counting.percentile(sorted(values), 0.5), 2)

    notes |= {
        "what": LABEL,
        "pages": len(steady),
        "pages_in_flight": load.pages,
        "requests_in_flight": load.requests,
        "tokens_a_page": round(fmean(page.tokens for page in steady), 1),
        "requests_a_page": round(fmean(asked), 1),
        **taken.notes,
    }

    def emit(what: str, value: float, unit: str, /, **more: Any) -> None:
        figures.emit(f"{name}.{what}", value, unit, **more)

    stages = zip(measuring.stage_names(), zip(*(answer.stages for answer in answers)))
    told = {"stages_p50": found} if (found := {stage: p50(ms) for stage, ms in stages}) else {}
    emit("pages_s", round(run.requests_s, 3), "pages/s", ci95=round(run.margin * run.requests_s, 3), **told, **notes)
    emit("whole", round(run.whole_requests_s, 3), "pages/s")
    emit("req_s", round(run.requests_s * fmean(asked[1:]), 2), "req/s")
    if not load.part:
        emit("tok_s", round(run.tokens_s, 1), "tok/s", responses_s=round(run.parts_s, 1))
        timed = [answer for answer in answers if answer.stages or answer.first_token is not None]
        layouts = {page.made_of[0] for page in steady}.intersection(timed)
        for what, each in (("prefill", first_token_ms), ("decode", token_ms)) if layouts else ():
            apart = {f"{what}_p50_ms_of_layouts": p50([each(answer) for answer in layouts])}
            emit(f"{what}_p50_ms", p50([each(answer) for answer in timed]), "ms", **apart)
        emit("page_p50_s", round(run.p50, 3), "s", p99_s=round(run.p99, 3))
    if taken.power:
        taken.power.emit(emit, run.requests_s, "page")


def split(taken: Mapping[str, Taken]) -> dict[str, tuple[float, float]]:
    """A page's joules in layouts, crops and, by difference, decoding, each with half its 95 % interval by the rates of
    the runs; none where one of the three runs is missing, or their watts."""
    runs = [taken.get(name) for name in ("saturated", "layouts", "crops")]
    drawn = [(each.power.watts / each.run.requests_s, each.run.margin) for each in runs if each and each.power]
    if len(drawn) < len(runs):
        return {}
    joules, margins = [value for value, _ in drawn], [value * margin for value, margin in drawn]
    left = joules[0] - joules[1] - joules[2]
    return {"layout": (joules[1], margins[1]), "crops": (joules[2], margins[2]), "decode": (left, hypot(*margins))}


def joules(taken: Taken) -> float:
    """A page's; NaN where nobody told the watts."""
    return taken.power.watts / taken.run.requests_s if taken.power else nan


def report_pruned(turns: Mapping[str, Sequence[Taken]], label: str, **notes: Any) -> None:
    """Emits a page's joules without equal groups, and what share they are of the whole pages' in the same turns;
    ``label`` ends the figures' names."""
    whole = [joules(taken) for taken in turns.get("saturated", ())]
    for load, most in PRUNED_JOULES.items():
        drawn = [joules(taken) for taken in turns.get(load, ())]
        if drawn and len(drawn) == len(whole):
            about = {"turns": len(drawn), "whole": round(fmean(whole), 2), "at_most": most, **notes}
            if len(drawn) > 1:
                about["share"], about["share_ci95"] = (round(part, 4) for part in ratio(drawn, whole))
            figures.emit(f"pages.{load}.joules{label}", round(fmean(drawn), 2), "J/page", **about)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", type=Path, help="what replay_pages made")
    add_target_arguments(parser)
    usual = [name for name, load in LOADS.items() if not load.pruned]
    parser.add_argument("--loads", nargs="+", default=usual, choices=LOADS)
    parser.add_argument("--pages", type=int, help="in flight, instead of the load's own")
    parser.add_argument("--requests", type=int, help="in flight at most, instead of the load's own")
    parser.add_argument("--least", type=int, default=LEAST, help="pages that a run reads")
    parser.add_argument("--processes", type=int, default=8, help="of the load generator")
    parser.add_argument("--whole", action="store_true", help="ask for answers whole, as tessera parse does")
    parser.add_argument("--seed", type=int, help="of the pictures' marks; default: a new one")
    parser.add_argument("--label", default="bf16", help="stands in the figures' names unless it is bf16")
    options = parser.parse_args()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    loads = [LOADS[name] for name in options.loads]
    loads = [
        replace(each, pages=options.pages or each.pages, requests=options.requests or each.requests) for each in loads
    ]
    if options.target == "openai" and any(load.pruned for load in loads):
        parser.error("only our own servers leave equal groups of patches out")
    count = len(ReplaySet(options.set).pages)
    pages = [pages_of_a_run(load, max(count, options.least)) for load in loads]
    lasts = sum(each / load.pace for each, load in zip(pages, loads))
    print(f"{sum(pages)} pages of {count}: about {lasts:.0f} s on an H200, and the server's start", file=sys.stderr)
    found: dict[str, list[Taken]] = {}
    with tempfile.TemporaryDirectory(prefix="tessera-replay-") as folder, reached(options) as target:
        encode_all(options.set, Path(folder), count)
        label = f".{options.label}" * (options.label != "bf16")
        prefix = "trial." * (not target.gpus) + target.prefix + "seeds.replay" + label
        for place, (load, asked) in enumerate(zip(loads, pages)):
            # No two loads share pictures, which the server would know by then.
            own_seed = seed + place
            reader = Reader(partial(connection, target, options.whole), options.set, Path(folder), load, own_seed)
            taken = drive(reader.prepare, load.pages, asked, options.processes, target.gpus, target.metrics)
            name = prefix + f".{load.name}" * (load.name != "saturated")
            report(load, taken, name, seed=own_seed, streamed=not options.whole, **target.notes)
            found.setdefault(load.name, []).append(taken)
    if target.gpus:
        report_pruned(found, label, streamed=not options.whole)
    parts = split({name: taken[-1] for name, taken in found.items()})
    for part, (joules, margin) in parts.items():
        share = joules / sum(value for value, _ in parts.values())
        figures.emit(
            f"{prefix}.{part}_joules", round(joules, 2), "J/page", ci95=round(margin, 2), share=round(share, 3)
        )
    return 0
