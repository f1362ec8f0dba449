"""The command ``tessera``: serve, ask, recall, status.

Results go to standard output, progress and tables to standard error. Exit codes: 0 done, 1 failed, 2 wrong usage or
wrong request, 3 the server is not there or not ready, 4 out of time, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tessera_client.client import Client
from tessera_client.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    TesseraClientError,
    Unavailable,
)

DEFAULT_URL = "localhost:8001"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. Faults become one line on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:
        return _serve(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except TesseraClientError as error:
        print(f"tessera {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        print(f"tessera {options.command}: interrupted", file=sys.stderr)
        return 130


def exit_code(error: TesseraClientError) -> int:
    """The exit code that stands for an error."""
    if isinstance(error, InvalidRequest):
        return 2
    if isinstance(error, (ConnectionFailed, Unavailable)):
        return 3
    return 4 if isinstance(error, DeadlineExceeded) else 1


def _serve(arguments: list[str]) -> int:
    try:
        from tessera.launcher.cli import serve_main
    except ImportError as error:
        print(f"tessera serve: the server's package is not installed here: {error}", file=sys.stderr)
        return 1
    return serve_main(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tessera", description="Questions about pictures, served by tritonserver.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{serve,ask,recall,status}")
    commands.add_parser("serve", help="start the server; `tessera serve --help` lists its options", add_help=False)

    ask = _command(commands, "ask", _ask, "ask one question about pictures")
    ask.add_argument("picture", nargs="*", help="JPEG, PNG or WebP files; none for a question without a picture")
    ask.add_argument("question")
    ask.add_argument("--stream", action="store_true", help="print the answer as it is written")
    _sampling(ask)
    ask.add_argument("--temperature", type=float, help="0, the default, is greedy")
    ask.add_argument("--seed", type=int)
    ask.add_argument("--json", action="store_true", help="print the whole answer with usage and timings as JSON")

    recall = _command(commands, "recall", _recall, "measure how often the served model is right")
    recall.add_argument("--limit", type=_positive, metavar="N", help="only N questions, evenly over the classes")
    recall.add_argument("--folder", type=Path, help="your own pictures: a folder with labels.csv (file,question,...)")
    recall.add_argument("--concurrency", type=_positive, default=16, metavar="N", help="requests at a time (16)")
    _sampling(recall)
    recall.add_argument("--cache", type=Path, metavar="DIR", help="keep the rendered pictures here for the next run")
    recall.add_argument("--repository", type=Path, metavar="DIR", help="the Tessera checkout, if not found from here")
    recall.add_argument("--workers", type=_positive, metavar="N", help="processes that render (one a core)")

    status = _command(commands, "status", _status, "say whether the server is ready and which models it has")
    status.add_argument("--probe", action="store_true", help="ask for one token too: ready is not always true")
    status.add_argument("--json", action="store_true")
    return parser


def _command(commands: Any, name: str, run: Callable[[Any], int], text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=run)
    parser.add_argument(
        "--url",
        default=os.environ.get("TESSERA_URL", DEFAULT_URL),
        help="host:port for gRPC or http://host:port (default: TESSERA_URL, else %(default)s)",
    )
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds a request may take (120)")
    return parser


def _sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="longest answer in tokens")
    parser.add_argument("--max-tiles", type=_positive, metavar="N", help="at most N tiles a picture")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _ask(options: argparse.Namespace) -> int:
    sampling = {name: getattr(options, name) for name in ("max_tokens", "max_tiles", "temperature", "seed")}
    question = (options.picture, options.question)
    with Client(options.url, timeout=options.timeout) as client:
        if options.stream and not options.json:
            with client.stream(*question, **sampling) as stream:
                for delta in stream:
                    print(delta.text, end="", flush=True)
            print()
            return 0
        answer = client.ask(*question, **sampling)
    print(json.dumps(asdict(answer), ensure_ascii=False) if options.json else answer.text)
    return 0


def _recall(options: argparse.Namespace) -> int:
    from tessera_client import recall
    from tessera_client.datasets import folder_items, heldout_items

    with Client(options.url, timeout=options.timeout) as client, _cache(options.cache) as cache:
        if not client.ready():
            client.status()  # says why, if it can
            raise Unavailable(f"the server at {options.url} is not ready", "see `tessera status`")
        if options.folder:
            items = folder_items(options.folder, options.limit)
        else:
            with _progress("rendering") as advance:
                items = heldout_items(
                    options.limit, cache, root=options.repository, workers=options.workers, progress=advance
                )
        with _progress("asking") as advance:
            outcomes, seconds = recall.run(
                client,
                items,
                concurrency=options.concurrency,
                progress=lambda done: advance(done, len(items)),
                max_tokens=options.max_tokens or 96,
                max_tiles=options.max_tiles,
            )
    result = recall.figures(outcomes, seconds)
    result |= {"concurrency": options.concurrency, "max_tiles": options.max_tiles, "url": options.url}
    from rich.console import Console

    recall.print_table(result, Console(stderr=True))
    print(json.dumps(result))
    first = next((outcome.error for outcome in outcomes if outcome.error), None)
    if first:
        print(f"tessera recall: {result['errors']} questions failed; the first: {first}", file=sys.stderr)
    return 1 if first else 0


@contextmanager
def _cache(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="tessera-recall-") as temporary:
        yield Path(temporary)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, driven by (done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _status(options: argparse.Namespace) -> int:
    with Client(options.url, timeout=min(options.timeout, 30.0)) as client:
        status = client.status()
        ready = client.ready()
        if ready and options.probe:
            client.ask(None, "Hello", max_tokens=1)
    if options.json:
        print(json.dumps({**asdict(status), "ready": ready}))
    else:
        print(f"{options.url}: {'ready' if ready else 'not ready'}, tritonserver {status.version}")
        for model in status.models:
            print(f"  {model.name:<20} {model.version or '-':<3} {model.state or 'UNLOADED'} {model.reason}".rstrip())
    return 0 if ready else 3


if __name__ == "__main__":
    sys.exit(main())
