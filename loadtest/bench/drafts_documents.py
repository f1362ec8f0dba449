"""Drafts of documents: what the text layers of the fixed pages say of the model's answers, `tessera parse` with drafts
and without, and pages of MinerU2.5's shape with those answers (parts of `drafts`).

Blocks are the generator's own, asked as MinerU's client asks for them, one by one; an answer is what the default
document model says. Each of its tokens is one that the draft has at that place, another one than it has, or one for
which it has none. They are counted in that model's tokens, nearly all of one character, and in those of MinerU2.5's
shape, whose 8,004 are made to do as MinerU2.5's own. That shape has random weights and no answers of its own, so that
:mod:`bench.drafts_stage` gives it these: requests carry their text and the name of what they have in common, as those
of `tessera parse` do, and the server's own drafters propose. A page comes again after 200 others, of whose answers a
server remembers those of the last four or so.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from difflib import unified_diff
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import figures
from load import Target
from measuring import Taken, drive
from PIL import Image
from serving import Running, serve, setup
from tokenizers import pre_tokenizers
from tqdm import tqdm

from bench import drafts_pages, replay, replay_set
from bench.drafts import DOCUMENTS, MINERU, both, drafting, emit, figure_name, turns
from bench.drafts_exact import Case, ask_all
from bench.replay_set import Page, ReplaySet, Request
from tessera.engine.drafts.text import TextDraft
from tessera.prompt.tokenizer import Tokenizer
from tessera_documents import TesseraVlmClient
from tessera_documents.engine import Mineru
from tessera_documents.job import Job, quiet
from tessera_documents.sources import open_document

RIGHT, WRONG, NONE = "=x-"
ANSWERS = "answers.json"
"""In the set of pages: the texts of all answers; beside the stage: their tokens."""
POOL = "pages"
PAGES_A_TURN = 20
STAGE = Path(__file__).with_name("drafts_stage.py")
CLIENT, _ = replay_set.parse(replay_set.RECORDED.read_text())
CLIENT.kinds["equation"] = CLIENT.kinds["[default]"] | {"prompt": "\nFormula Recognition:"}


class Asked(NamedTuple):
    """``kind``: of the block, or "layout"; ``case``: how it is asked, until the answer's end."""

    kind: str
    request: Request
    case: Case


def page_requests(pdf: Path, count: int) -> list[list[Asked]]:
    """What is asked about each of the first pages of the set, the layout first; prepared on all cores."""
    drafts_pages.check(pdf)
    with ProcessPoolExecutor() as pool:
        return list(pool.map(partial(asked_about, pdf), range(count)))


def asked_about(pdf: Path, number: int) -> list[Asked]:
    """What is asked about one page."""
    import pages

    document = open_document(pdf)
    page, picture = pages.sample(drafts_pages.FIRST + number, "heldout"), document.render(number, replay_set.DPI)
    asked, text = [("layout", Request("[layout]", 0))], document.text(number)
    document.close()
    for block in pages.read_blocks(page):
        kind, box = block.kind if block.kind in CLIENT.kinds else "[default]", pages.thousandths(block.box, page)
        draft = text and text.draft(block.kind, [side / 1000 for side in box])
        asked.append((block.kind, Request(kind, 0, box, {"draft": draft} if draft else {})))
    ends = {"ignore_eos": False, "max_tokens": 2048}
    return [
        Asked(
            kind,
            each,
            Case("pages", CLIENT.messages(each, CLIENT.picture(picture, each)), CLIENT.sampling(each) | ends),
        )
        for kind, each in asked
    ]


def marks(draft: Sequence[int], answer: Sequence[int]) -> str:
    """Of each of the answer's tokens: what the draft has there."""
    drafter, found = TextDraft(draft), ""
    for place, token in enumerate(answer):
        proposed = drafter.propose(answer[:place], 1)
        found += NONE if not proposed else RIGHT if proposed[0] == token else WRONG
    return found


def summed(found: Sequence[str]) -> dict[str, float]:
    """Of some answers' marks: how many tokens there are, the share that the drafts have, and tokens between two that
    they have not."""
    tokens, right = sum(map(len, found)), sum(each.count(RIGHT) for each in found)
    return {"count": tokens, "share": round(right / tokens, 4), "between": round(tokens / max(1, tokens - right), 2)}


def mineru(place: Path) -> Path:
    """A folder in ``place``: MinerU2.5's shape, with a token for each digit and for each sign of layouts and tables, as
    MinerU2.5's own has. So a block of a layout is 22 tokens, and not 45."""
    folder = Path(shutil.copytree(MINERU, place / MINERU.name))
    backend = Tokenizer.from_folder(MINERU).backend
    backend.add_tokens([*Tokenizer.from_folder(DOCUMENTS).added_tokens.values()])
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def run_acceptance(options: argparse.Namespace) -> None:
    """Asks the default document model about the pages, emits what their text layers have of its answers, and writes the
    pages with these for :func:`run_replay`."""
    found, told = defaultdict[str, list[list[str]]](list), list[str]()
    with tempfile.TemporaryDirectory(prefix="tessera-drafts-") as place:
        letters, words = map(Tokenizer.from_folder, (DOCUMENTS, mineru(Path(place))))
    asked = page_requests(options.pages, pages_of(options))
    with serve(drafting(options, DOCUMENTS)[0]) as server:
        cases = [each.case for page in asked for each in page]
        answers = iter(ask_all(server.grpc, cases, options.in_flight))

    def read() -> Iterator[tuple[Page, Image.Image]]:
        document = open_document(options.pages)
        for number, page in enumerate(tqdm(asked, "pages")):
            requests = []
            for each, answer in zip(page, answers):
                texts = each.request.more.get("draft", ""), answer.text
                draft, said = map(words.encode, texts)
                pair = [marks(*(letters.encode(text, special=False) for text in texts)), marks(draft, said)]
                kinds = ("all", each.kind, "hard_pages" if drafts_pages.hard(number) else "plain_pages")
                for kind in kinds if each.kind != "layout" else ():
                    found[kind].append(pair)
                more = {**each.request.more, "draft_pool": POOL, "seed": len(told)}
                requests.append(replace(each.request, tokens=len(said) + 1, more=more))
                told.append(answer.text)
            yield Page(f"page {number}", tuple(requests)), document.render(number, replay_set.DPI)
        document.close()

    replay_set.write(options.accepted, CLIENT, read())
    with zipfile.ZipFile(options.accepted, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr(ANSWERS, json.dumps(told))
    for kind, pairs in found.items():
        characters, tokens = (summed(side) for side in zip(*pairs))
        about = {"answers": len(pairs), "pages": len(asked), "of_characters": characters, "of_tokens": tokens}
        name = figure_name(options, f"acceptance.{kind}.characters").removeprefix("trial.")
        figures.emit(name, characters["between"], "characters", **about)


def pages_of(options: argparse.Namespace) -> int:
    return round(options.share * drafts_pages.PAGES)


def perfect(recorded: ReplaySet, answers: Sequence[str], path: Path) -> Path:
    """The set without its pictures, where each crop's draft is its answer: no text could foretell more of it."""
    pages = []
    for page in recorded.pages:
        crops = [replace(each, more={**each.more, "draft": answers[each.more["seed"]]}) for each in page.requests[1:]]
        pages.append((replace(page, requests=(page.requests[0], *crops)), None))
    replay_set.write(path, recorded.client, pages)
    return path


def run_replay(options: argparse.Namespace) -> None:
    """Pages of MinerU2.5's shape in turns, with the answers that were recorded; with one kind of crops alone.
    `ceiling`: without drafts, were the tokens of crops but the first at no cost. `perfect`: where crops' drafts are
    their answers. `cut`: where each proposal ends before its first wrong token, of which then none costs anything."""
    recorded, loads = ReplaySet(options.accepted), options.loads or ("c10", "saturated")
    pages = len(recorded.pages)
    with tempfile.TemporaryDirectory(prefix="tessera-drafts-") as place:
        repository = Path(place, "model_repository")
        shutil.copytree(figures.ROOT / "model_repository", repository, ignore=shutil.ignore_patterns("__pycache__"))
        checkpoint, stage = options.checkpoint or mineru(Path(place)), repository / "language_model" / "1" / "model.py"
        shutil.copyfile(STAGE, stage)
        with zipfile.ZipFile(options.accepted) as file:
            told = json.loads(file.read(ANSWERS))
        stage.with_name(ANSWERS).write_text(json.dumps([*map(Tokenizer.from_folder(checkpoint).encode, told)]))
        replay.encode_all(options.accepted, Path(place), pages)
        if options.cut:
            stage.with_name("cut").touch()
        asked_of = perfect(recorded, told, Path(place, "perfect.zip")) if options.perfect else options.accepted

        def read(load: replay.Load, server: Running, seed: int) -> Taken:
            load = replace(load, pages=options.in_flight or load.pages)
            connect = partial(replay.connection, Target("tessera", server.grpc), True)
            reader = replay.Reader(connect, asked_of, Path(place), load, seed)
            count, gpus = replay.pages_of_a_run(load, 0), setup(options).gpus
            return drive(reader.prepare, load.pages, count, options.processes, gpus, server.metrics)

        asked = {
            f"{kind.strip('[]')}." * bool(kind) + name: partial(read, replace(replay.LOADS[name], kind=kind))
            for kind in options.kinds
            for name in loads
        }
        with both(options, checkpoint, repository) as servers:
            compared = turns(options, servers, asked)
            for name, found in compared.items():
                name = "perfect." * options.perfect + "cut." * options.cut + name
                emit(options, f"pages.{name}.ratio", found, what="recorded answers, random weights", pages=pages)
            for name in loads if "" in options.kinds and not (options.perfect or options.cut) else ():
                load, usual = replace(replay.LOADS[name], crops_end=True), compared[name]
                best = read(load, servers[1], random.randrange(1 << 30)).run.requests_s
                below = fmean(usual.worth(told) for told, _ in usual.turns)
                figures.emit(figure_name(options, f"pages.{name}.ceiling"), round(best / below, 4), "ratio")


class Parsed(NamedTuple):
    """Pages a second, and what was written of each page."""

    rate: float
    pages: list[str]


def run_parse(options: argparse.Namespace) -> None:
    """`tessera parse` by the default document model, in turns. Each turn reads other pages until all were read: then,
    or with a smaller ``--share`` sooner, the vision stage knows their pictures, and the ratio is another one."""
    count, dealt = pages_of(options), dict[int, list[int]]()
    order, each = random.sample(range(1, count + 1), count), min(count, PAGES_A_TURN)

    def parse(server: Running, seed: int) -> Parsed:
        first = len(dealt) * each
        return parsed(server.grpc, options.pages, dealt.setdefault(seed, sorted((order * 2)[first % count :][:each])))

    quiet()
    drafts_pages.check(options.pages)
    with both(options, DOCUMENTS) as servers:
        found = turns(options, servers, {"parse": parse}, worth=lambda told: told.rate)["parse"]
    pairs = [pair for turn in found.turns for pair in zip(*(told.pages for told in turn))]
    for below, above in pairs:
        lines = below.splitlines(keepends=True), above.splitlines(keepends=True)
        sys.stderr.writelines(unified_diff(*lines, "without drafts", "with drafts", n=1))
    name = figure_name(options, "pages.ratio" if options.gpus else "cpu.pages.ratio").removeprefix("trial.")
    emit(options, name, found, pages=len(pairs), pages_that_differ=sum(one != other for one, other in pairs))


def run_ceiling(options: argparse.Namespace) -> None:
    """What a page takes on a server without drafts, layouts and crops apart: until each answer's first token, and then,
    with pictures and prompts in its caches, for all others. Were those of crops, which alone have a text to draft them,
    at no cost, the ratio would be the figure; `perfect`: did they take what they do where drafts are their answers."""
    pages = [[each.case for each in page] for page in page_requests(options.pages, pages_of(options))]
    layouts, crops = [page[0] for page in pages], [case for page in pages for case in page[1:]]

    def ask(server: Running, cases: Sequence[Case], **more: Any) -> tuple[float, list[str]]:
        began, more = time.perf_counter(), {"logprobs": None, **more}
        answers = ask_all(
            server.grpc, [case._replace(options=case.options | more) for case in cases], options.in_flight
        )
        return (time.perf_counter() - began) / len(pages), [answer.text for answer in answers]

    above, below = drafting(options, DOCUMENTS)
    with serve(below) as server:
        first = {kind: ask(server, cases, max_tokens=1)[0] for kind, cases in (("layouts", layouts), ("crops", crops))}
        layouts_tokens, _ = ask(server, layouts)
        crops_tokens, answers = ask(server, crops, draft=None)
    known = [case._replace(options=case.options | {"draft": answer}) for case, answer in zip(crops, answers)]
    with serve(above) as server:
        ask(server, [*layouts, *crops], max_tokens=1)
        drafted = {"layouts_drafted": ask(server, layouts, draft_pool=POOL)[0], "crops_perfect": ask(server, known)[0]}
    took = {**first, "layouts_tokens": layouts_tokens, "crops_tokens": crops_tokens, **drafted}
    notes = {"pages": len(pages), "s_a_page": {name: round(seconds, 3) for name, seconds in took.items()}}
    read = sum(first.values())
    whole = read + layouts_tokens + crops_tokens
    for name, left in (("ceiling", read + layouts_tokens), ("perfect", read + sum(drafted.values()))):
        name = figure_name(options, f"{'' if options.gpus else 'cpu.'}pages.{name}").removeprefix("trial.")
        figures.emit(name, round(whole / left, 3), "ratio", **notes)


def parsed(addresses: Sequence[str], pdf: Path, numbers: Sequence[int]) -> Parsed:
    """These pages, counted from 1."""
    with tempfile.TemporaryDirectory(prefix="tessera-drafts-") as place, TesseraVlmClient(addresses) as vlm:
        asked = {"dpi": replay_set.DPI, "concurrency": 64, "priority": 0, "password": None, "force": False}
        job = Job([pdf], Path(place), Mineru(vlm), pages=",".join(map(str, numbers)), patience=60.0,
                  notice=print, progress=lambda *_: None, **asked)  # fmt: skip
        tally = job.run()
        files = [Path(place, pdf.name, f"page-{number:04}.json") for number in numbers]
        return Parsed(tally.made / tally.seconds, [file.read_text() for file in files])
