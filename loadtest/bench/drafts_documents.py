"""Drafts of documents: what the text layers of the fixed pages say of the model's answers, `tessera parse` with drafts
and without, and pages of MinerU2.5's shape whose drafts are accepted as was measured (parts of `drafts`).

Blocks are the generator's own, asked as MinerU's client asks for them, one by one; an answer is what the default
document model says. Each of its tokens is one that the draft has at that place, another one than it has, or one for
which it has none: the answer's marks. They are counted in that model's tokens, nearly all of one character, and in
those of `--tokenizer`, by default of MinerU2.5's shape, which has 8,004. That shape has random weights and no answers
of its own, so that :mod:`bench.drafts_stage` has its server accept by the marks that a request carries as its draft.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import figures
from load import Target
from measuring import Taken, drive
from PIL import Image
from serving import Running, serve, setup, setup_notes
from tqdm import tqdm
from turns import Comparison, compare

from bench import drafts_pages, replay, replay_set
from bench.drafts import DOCUMENTS, MINERU, both, both_ways, comparison, drafting, figure_name
from bench.drafts_exact import Case, ask_all
from bench.replay import Load
from bench.replay_set import Page, ReplaySet, Request
from tessera_documents import TesseraVlmClient
from tessera_documents.engine import Mineru
from tessera_documents.job import Job
from tessera_documents.sources import open_document

RIGHT, WRONG, NONE = "=x-"
STAGE = Path(__file__).with_name("drafts_stage.py")
CLIENT, _ = replay_set.parse(replay_set.RECORDED.read_text())
CLIENT.kinds["equation"] = CLIENT.kinds["[default]"] | {"prompt": "\nFormula Recognition:"}


class Asked(NamedTuple):
    """``kind``: of the block, or "layout"."""

    kind: str
    request: Request
    case: Case


def page_requests(pdf: Path, count: int) -> Iterator[tuple[Image.Image, list[Asked]]]:
    """Of the first pages of the set: each as it is rendered, and what is asked about it, the layout first."""
    from document_samples import read_blocks, thousandths

    import pages

    drafts_pages.check(pdf)
    document = open_document(pdf)
    for number in range(count):
        page, picture = pages.sample(drafts_pages.FIRST + number, "heldout"), document.render(number, replay_set.DPI)
        asked = [Asked("layout", *case(picture, Request("[layout]", 0)))]
        text = document.text(number)
        for block in read_blocks(page):
            kind, box = block.kind if block.kind in CLIENT.kinds else "[default]", thousandths(block.box, page)
            draft = text and text.draft(block.kind, [side / 1000 for side in box])
            request = Request(kind, 0, box, draft or "")
            asked.append(Asked(block.kind, *case(picture, request)))
        yield picture, asked
    document.close()


def case(picture: Image.Image, request: Request) -> tuple[Request, Case]:
    """With how it is asked, until the answer's end."""
    sampling = CLIENT.sampling(request) | {"ignore_eos": False, "max_tokens": 2048}
    return request, Case("pages", CLIENT.messages(request, CLIENT.picture(picture, request)), sampling)


def page_cases(pdf: Path, count: int) -> Iterator[Case]:
    return (each.case for _, asked in page_requests(pdf, count) for each in asked)


def marks(draft: Sequence[int], answer: Sequence[int]) -> str:
    """Of each of the answer's tokens."""
    from tessera.engine.drafts.text import TextDraft

    drafter, known, found = TextDraft(draft), [], ""
    for token in answer:
        proposed = drafter.propose(known, 1)
        found += NONE if not proposed else RIGHT if proposed[0] == token else WRONG
        known.append(token)
    return found


def summed(found: Sequence[str]) -> dict[str, float]:
    """Of some answers' marks: how many tokens there are, the share that the drafts have, and tokens between two that
    they have not."""
    tokens, right = sum(map(len, found)), sum(each.count(RIGHT) for each in found)
    between = tokens / max(1, tokens - right)
    return {"count": tokens, "share": round(right / tokens, 4), "between": round(between, 2)}


def run_acceptance(options: argparse.Namespace) -> None:
    """Asks the default document model about the pages, emits what their text layers have of its answers, and writes the
    pages with the marks for :func:`run_replay`."""
    from tessera.prompt.tokenizer import Tokenizer

    tokenizers = [Tokenizer.from_folder(folder) for folder in (DOCUMENTS, options.tokenizer or MINERU)]
    found: dict[str, list[list[str]]] = defaultdict(list)
    written = []
    with serve(drafting(options, DOCUMENTS)[0]) as server:
        for number, (picture, asked) in enumerate(tqdm(page_requests(options.pages, options.count), "pages")):
            requests = []
            answers = ask_all(server.grpc, [each.case for each in asked], options.in_flight or 64)
            for each, answer in zip(asked, answers):
                texts = each.request.draft, answer.text
                own = [marks(*(tokenizer.encode(text, special=False) for text in texts)) for tokenizer in tokenizers]
                if each.kind != "layout":
                    for kind in ("all", each.kind, "hard_pages" if drafts_pages.hard(number) else "plain_pages"):
                        found[kind].append(own)
                carried = "".join(f" {mark}" for mark in own[1]) if texts[0] else ""
                requests.append(replace(each.request, tokens=len(own[1]) + 1, draft=carried))
            written.append((Page(f"page {number}", tuple(requests)), picture))
    replay_set.write(options.accepted, CLIENT, written)
    for kind, pairs in found.items():
        characters, tokens = (summed(side) for side in zip(*pairs))
        about = {"answers": len(pairs), "pages": options.count, "of_characters": characters, "of_tokens": tokens}
        name = figure_name(options, f"acceptance.{kind}.characters").removeprefix("trial.")
        figures.emit(name, characters["between"], "characters", **about)


def run_replay(options: argparse.Namespace) -> None:
    """Pages of MinerU2.5's shape in turns, with the drafts as they were accepted."""
    with tempfile.TemporaryDirectory(prefix="tessera-drafts-") as place:
        folder, path = Path(place), options.accepted
        if options.kind:
            path = only(options.accepted, options.kind, folder / "set.zip")
        count = len(ReplaySet(path).pages)
        replay.encode_all(path, folder, count)
        repository = folder / "model_repository"
        shutil.copytree(figures.ROOT / "model_repository", repository, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copyfile(STAGE, repository / "language_model" / "1" / "model.py")
        with both(options, options.checkpoint or MINERU, repository) as servers:
            compared = {}
            for name in options.loads:
                load = replay.LOADS[name]
                load = replace(load, pages=options.in_flight or load.pages)
                compared[name] = comparison(servers, partial(read_pages, options, load, path, folder))
            compare(compared, options.seconds)
        for name, each in compared.items():
            kind = f"{options.kind}." * bool(options.kind)
            about = (
                both_ways(each)
                | setup_notes(options)
                | {"what": "accepted as measured, random weights", "pages": count}
            )
            figures.emit(
                figure_name(options, f"pages.{kind}{name}.ratio"), round(each.ratio.value, 4), "ratio", **about
            )


def only(path: Path, kind: str, out: Path) -> Path:
    """The set with one kind of crops."""
    pages = ReplaySet(path)
    kept = [replace(page, requests=tuple(each for each in page.requests if each.kind in ("[layout]", kind)))
            for page in pages.pages]  # fmt: skip
    replay_set.write(out, pages.client, ((page, pages.picture(number)) for number, page in enumerate(kept)))
    return out


def read_pages(options: argparse.Namespace, load: Load, path: Path, folder: Path, server: Running, seed: int) -> Taken:
    connect = partial(replay.connection, Target("tessera", server.grpc), True)
    reader = replay.Reader(connect, path, folder, load, seed)
    pages = replay.pages_of_a_run(load, 0)
    return drive(reader.prepare, load.pages, pages, options.processes, setup(options).gpus, server.metrics)


class Parsed(NamedTuple):
    """Pages a second, and what was written of each page."""

    rate: float
    pages: list[str]


def run_parse(options: argparse.Namespace) -> None:
    """`tessera parse` by the default document model, in turns; each turn reads other pages."""
    order, dealt = random.sample(range(1, options.count + 1), options.count), dict[int, list[int]]()

    def parse(server: Running, seed: int) -> Parsed:
        if seed not in dealt:
            dealt[seed] = [order[(len(dealt) * options.each + at) % len(order)] for at in range(options.each)]
        return parsed(server.grpc, options.pages, sorted(dealt[seed]))

    drafts_pages.check(options.pages)
    with both(options, DOCUMENTS) as servers:
        on, off = (partial(parse, server) for server in servers)
        compared = Comparison(on, off, lambda parsed: parsed.rate)
        compare({"parse": compared}, options.seconds)
    off_told, on_told = zip(*compared.turns)
    pairs = [pair for one, other in zip(on_told, off_told) for pair in zip(one.pages, other.pages)]
    rates = [[round(told.rate, 4) for told in side] for side in (off_told, on_told)]
    ratio, device = compared.ratio, "" if options.gpus else "cpu."
    name = figure_name(options, f"{device}pages.ratio").removeprefix("trial.")
    about = {"ci95": round(ratio.ci95, 4), "turns": len(compared.turns), "pages_s": rates, "pages": len(pairs)}
    differ = sum(one != other for one, other in pairs)
    figures.emit(name, round(ratio.value, 4), "ratio", pages_that_differ=differ, **about)


def parsed(addresses: Sequence[str], pdf: Path, numbers: Sequence[int]) -> Parsed:
    """These pages, counted from 1."""
    with tempfile.TemporaryDirectory(prefix="tessera-drafts-") as place, TesseraVlmClient(addresses) as vlm:
        asked = {"dpi": replay_set.DPI, "concurrency": 64, "priority": 0, "password": None, "force": False}
        job = Job([pdf], Path(place), Mineru(vlm), pages=",".join(map(str, numbers)), patience=60.0,
                  notice=print, progress=lambda *_: None, **asked)  # fmt: skip
        tally = job.run()
        files = [Path(place, pdf.name, f"page-{number:04}.json") for number in numbers]
        return Parsed(tally.made / tally.seconds, [file.read_text() for file in files])
