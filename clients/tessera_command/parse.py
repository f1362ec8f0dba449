"""The command ``tessera parse``: its arguments, and what it says at the end."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tessera_client.retry import Retry
from tessera_command.terminal import command, positive, progress


def add(commands: Any) -> None:
    """Adds the command to the others."""
    add = command(commands, "parse", run, "read documents: PDFs and pictures of pages to Markdown and JSON", 600)
    add("file", nargs="+", type=Path, help="PDFs, pictures of pages, and folders with any of them")
    each = "a folder for each file, and errors.jsonl; the same command goes on where it ended, page by page"
    add("-o", "--output", type=Path, required=True, metavar="OUT", help=each)
    add("--pages", metavar="RANGES", help="of each document these, as in 1-3,7,10- (all)")
    add("--password", metavar="TEXT", help="of the PDFs that want one")
    add("--dpi", type=positive, default=200, metavar="N", help="at which a PDF's pages are drawn (%(default)s)")
    add("--concurrency", type=positive, default=64, metavar="N", help="requests at a time (%(default)s)")
    longest = "longest answer to a layout or a crop, in tokens (as many as fit)"
    add("--max-tokens", type=positive, metavar="N", help=longest)
    lower = "lower is served earlier (%(default)s: behind people's questions, which have 0)"
    add("--priority", type=int, default=10, metavar="N", help=lower)
    add("--patience", type=float, default=600.0, metavar="S", help="seconds to wait for servers (%(default)g)")
    add("--force", action="store_true", help="read pages again that another model has read")


def run(options: argparse.Namespace) -> int:
    try:
        from tessera_documents import TesseraVlmClient
        from tessera_documents.job import Job, quiet
    except ImportError as error:
        print(f"tessera parse: {error}", file=sys.stderr)
        return 1
    quiet()
    asking = {"timeout": options.timeout, "retry": Retry.patient(options.patience), "max_tokens": options.max_tokens}
    names = ("dpi", "concurrency", "priority", "pages", "password", "force", "patience")
    flight = {name: getattr(options, name) for name in names}
    with TesseraVlmClient(options.url, **asking) as vlm, progress("parsing") as advance:
        job = Job(options.file, options.output, vlm, progress=advance, notice=_notice, **flight)
        try:
            tally = job.run()
        except OSError as error:
            print(f"tessera parse: cannot write the results: {error}", file=sys.stderr)
            return 1
    pages, rate = f"{tally.made} page{'s' * (tally.made != 1)}", f"{tally.made / tally.seconds:.2f} pages/s"
    kept = f", {tally.kept} were there already" if tally.kept else ""
    print(f"{pages} in {tally.seconds:.1f} s ({rate}){kept}")
    if tally.warned:
        print(f"tessera parse: warnings on {tally.warned} pages; the first: {tally.first_warning}", file=sys.stderr)
    if tally.failed:
        rows = options.output / "errors.jsonl"
        print(f"tessera parse: {tally.failed} failed, see {rows}; the first: {tally.first_error}", file=sys.stderr)
    return 1 if tally.failed else 0


def _notice(words: str) -> None:
    print(f"tessera parse: {words}", file=sys.stderr)
