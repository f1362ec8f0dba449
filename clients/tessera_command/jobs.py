"""The commands ``tessera batch`` and ``tessera parse``, which go on where they ended, and ``tessera audit``, which asks
a batch again: their arguments, and what they say at the end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera_command.terminal import Health, command, labels, positive, progress, sampling, supervised
from tessera_wire.errors import InvalidRequest

if TYPE_CHECKING:
    from tessera_jobs.job import Job, Tally
    from tessera_jobs.rows import Source


def add_batch(commands: Any) -> None:
    """Adds the command to the others."""
    add = command(commands, "batch", _batch, "ask about any number of pictures; goes on where it ended")
    rows = "a .jsonl (id, image, question, options; or OpenAI's lines of a batch), a .csv or .parquet with such columns"
    add("source", type=Path, help=f"{rows}, a folder of pictures, or - for lines on standard input")
    add("--prompt", metavar="TEXT", help="the question of rows that have none of their own")
    where = "results, .jsonl or .parquet; the same command goes on where it ended, row by row"
    add("-o", "--output", type=Path, required=True, metavar="OUT", help=where)
    sampling(add)
    add("--choices", type=labels, metavar="A,B,...", help="answer with the likeliest of these")
    add("--in-order", action="store_true", help="results in the order of the rows, not as they come")
    add("--again", action="store_true", help="ask rows again that failed in an earlier run")
    changed = "ask rows again that another model answered, or whose pictures have changed since"
    _job_options(add, "seconds to wait for servers, at the start too (%(default)g)", changed)
    add("--dry-run", action="store_true", help="say what it will cost, from some of the rows; nothing is written")


def add_audit(commands: Any) -> None:
    """Adds the command to the others."""
    add = command(commands, "audit", _audit, "ask a batch's rows again and compare answers bit by bit")
    add("source", type=Path, metavar="requests", help="the rows, as `tessera batch` was given them")
    add("answers", type=Path, help="the .jsonl that it wrote")
    add("--prompt", metavar="TEXT", help="as then")
    sampling(add)
    add("--choices", type=labels, metavar="A,B,...", help="as then")
    other = "compare where another server answered then, by its fingerprint, or one that does not say"
    _job_options(add, "seconds to wait for servers, at the start too (%(default)g)", other)


def add_parse(commands: Any) -> None:
    """Adds the command to the others."""
    add = command(commands, "parse", _parse, "read documents: PDFs and pictures of pages to Markdown and JSON", 600)
    add("file", nargs="+", type=Path, help="PDFs, pictures of pages, and folders with any of them")
    each = "a folder for each file, and errors.jsonl; the same command goes on where it ended, page by page"
    add("-o", "--output", type=Path, required=True, metavar="OUT", help=each)
    add("--pages", metavar="RANGES", help="of each document these, as in 1-3,7,10- (all)")
    add("--password", metavar="TEXT", help="of the PDFs that want one")
    add("--dpi", type=positive, default=200, metavar="N", help="at which a PDF's pages are drawn (%(default)s)")
    longest = "longest answer to a layout or a crop, in tokens (as many as fit)"
    add("--max-tokens", type=positive, metavar="N", help=longest)
    add("--engine", choices=("mineru", "paddleocr-vl"), default="mineru", help="whose prompts are asked (%(default)s)")
    found = "a server of MinerU2.5 or its like, which finds what paddleocr-vl reads (else a page is one text)"
    add("--layout-url", metavar="URL", help=found)
    figures = "ask about figures and charts too, which MinerU2.5-Pro describes and reads"
    add("--image-analysis", action="store_true", help=figures)
    without = "ask about {} without the equal groups of their patches, which are read sooner and not quite the same"
    add("--prune-crops", action="store_true", help=without.format("crops"))
    add("--prune-layout", action="store_true", help=without.format("whole pages, for their layout"))
    given = "send no text of a PDF along, and propose nothing of earlier answers: the results are the same, and slower"
    add("--no-drafts", dest="drafts", action="store_false", help=given)
    changed = "read pages again that another model has read"
    _job_options(add, "seconds to wait for servers (%(default)g)", changed)


def _job_options(add: Callable[..., Any], patience: str, force: str) -> None:
    add("--concurrency", type=positive, default=64, metavar="N", help="requests at a time (%(default)s)")
    lower = "lower is served earlier (%(default)s: behind people's questions, which have 0)"
    add("--priority", type=int, default=10, metavar="N", help=lower)
    add("--patience", type=float, default=600.0, metavar="S", help=patience)
    add("--force", action="store_true", help=force)


def _saying(name: str) -> Callable[[str], None]:
    return lambda words: print(f"tessera {name}: {words}", file=sys.stderr)


def _of(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def _rows(options: argparse.Namespace) -> Source:
    from tessera_jobs.source import open_source

    given = _of(options, "max_tokens", "max_tiles", "choices", "priority")
    return open_source(options.source, options.prompt, {k: v for k, v in given.items() if v is not None})


def _batch(options: argparse.Namespace) -> int:
    from tessera_jobs.job import Job

    say, source = _saying("batch"), _rows(options)
    how = _of(options, "url", "timeout", "concurrency", "in_order", "again", "patience", "force")
    job = Job(source, options.output, **how, notice=say)
    if options.dry_run:
        return _estimate(job)
    with progress("asking") as job.progress:
        tally = job.run()
    if source.passed_over:
        say(f"passed over in {source.path}: {', '.join(source.passed_over)}")
    page = supervised(options.url) if tally.cascades else None
    print(_sentence(tally, page))
    if page and page.alarm:
        say(f"the server's cascade is not as planned: {page.alarm}")
    if tally.errors:
        first = f"; the first of this run: {tally.first_error}" if tally.first_error else ""
        say(f"{tally.errors} rows of {options.output} have an error{first}")
    return 1 if tally.errors else 0


def _audit(options: argparse.Namespace) -> int:
    from tessera_jobs.audit import audit

    say, how = _saying("audit"), _of(options, "url", "timeout", "concurrency", "patience", "force")
    with progress("asking again") as advance:
        found = audit(_rows(options), options.answers, **how, notice=say, progress=advance)
    for name, where in found.differences:
        print(f"{name}: {where}")
    if found.fingerprint.endswith(".fast"):
        say("the server is not deterministic: bits may differ by what else it did")
    if found.left_out:
        say(f"{found.left_out} rows left out: they had no answer, or were sampled without a seed")
    compared = f"{found.asked} answers, {found.with_logprobs} of them with log probabilities"
    print(f"{compared}: {len(found.differences) or 'none'} differ{'s' * (len(found.differences) < 2)}")
    return 1 if found.differences else 0


def _sentence(tally: Tally, page: Health | None) -> str:
    asked = tally.answered + tally.failed
    rate = f" in {tally.seconds:.1f} s ({tally.speed(tally.seconds)})" if asked else ""
    parts = [f"{asked} row{'s' * (asked != 1)}{rate}"]
    parts += [f"{tally.same} the same as another"] if tally.same else []
    parts += [f"{tally.kept} were there already"] if tally.kept else []
    parts += [f"{tally.escalated} of {tally.cascades} cascades escalated"] if tally.cascades else []
    if page and page.cascade_audits:
        parts += [f"{page.cascade_disagreements} of the server's {page.cascade_audits} audits so far disagreed"]
    return ", ".join(parts)


def _estimate(job: Job) -> int:
    from tessera_jobs.job import estimate

    found = estimate(job)
    left = found.left
    lines = [f"{left} rows to ask" + (f", {found.rows - left} of {found.rows} are over" if left < found.rows else "")]
    if found.minutes is not None:
        tokens = {"picture": found.image_tokens, "prompt": found.prompt_tokens, "answer": found.answer_tokens}
        lines += [
            f"{found.units * left:,.0f} {found.unit} ({found.units:g} a row)",
            *(f"{mean * left:,.0f} {what} tokens ({mean:g} a row)" for what, mean in tokens.items()),
            f"{found.minutes:g} minutes, at the {found.rows_s:g} rows/s of {found.sample} rows that were asked",
        ]
    if found.failed:
        lines.append(f"{found.failed} of these {found.sample} failed; the first: {found.first_error}")
    print("\n".join(lines), file=sys.stderr)
    print(json.dumps(asdict(found)))
    return 0


def _parse(options: argparse.Namespace) -> int:
    say = _saying("parse")
    try:
        from tessera_documents import TesseraVlmClient
        from tessera_documents.engine import Mineru, PaddleOcrVl
        from tessera_documents.job import Job, quiet
    except ImportError as error:
        say(str(error))
        return 1
    quiet()
    how = _of(options, "dpi", "concurrency", "priority", "pages", "password", "force", "patience", "drafts")
    paddle, analysis = options.engine == "paddleocr-vl", options.image_analysis
    prune = [step for step in ("layout", "crops") if vars(options)[f"prune_{step}"]]
    meaningless = {
        "--image-analysis": paddle and analysis,
        "--layout-url": options.layout_url and not paddle,
        "--prune-layout": "layout" in prune and paddle and not options.layout_url,
    }
    for option, stated in meaningless.items():
        if stated:
            raise InvalidRequest(f"{option} means nothing to --engine {options.engine}", "leave it out")
    with ExitStack() as servers:

        def connect(url: str) -> TesseraVlmClient:
            return servers.enter_context(TesseraVlmClient(url, timeout=options.timeout, max_tokens=options.max_tokens))

        layout = Mineru(connect(options.layout_url), prune=prune) if options.layout_url else None
        vlm, advance = connect(options.url), servers.enter_context(progress("parsing"))
        engine = PaddleOcrVl(vlm, layout, prune) if paddle else Mineru(vlm, analysis, prune)
        job = Job(options.file, options.output, engine, **how, notice=say, progress=advance)
        try:
            tally = job.run()
        except OSError as error:
            say(f"cannot write the results: {error}")
            return 1
    pages, rate = f"{tally.made} page{'s' * (tally.made != 1)}", f"{tally.made / tally.seconds:.2f} pages/s"
    kept = f", {tally.kept} were there already" if tally.kept else ""
    print(f"{pages} in {tally.seconds:.1f} s ({rate}){kept}")
    if tally.warned:
        say(f"warnings on {tally.warned} pages; the first: {tally.first_warning}")
    if tally.failed:
        say(f"{tally.failed} failed, see {options.output / 'errors.jsonl'}; the first: {tally.first_error}")
    return 1 if tally.failed else 0
