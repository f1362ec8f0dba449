"""The command ``tessera``: serve, check, gateway, quantize, ask, batch, audit, parse, recall, plan, status, sample.

Results go to standard output, progress and tables to standard error. Exit codes: 0 done, 1 failed, 2 wrong usage or
wrong request, 3 the server is not there or not ready, 4 out of time, 130 interrupted.
"""

import argparse
import json
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tessera_client.client import Client
from tessera_client.messages import ServerStatus
from tessera_command import ask, jobs, sample, terminal
from tessera_command.terminal import command, console, labels, positive, progress, sampling
from tessera_evaluation import cascade, plan, recall
from tessera_evaluation.datasets import Item, folder_items, heldout_items
from tessera_wire import MOST_TOKENS, __version__, errors
from tessera_wire.command_line import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. Faults become one line on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ELSEWHERE:
        name, *arguments = arguments
        try:
            run = _elsewhere(name)
        except ImportError as error:
            print(f"tessera {name}: {ELSEWHERE[name][1]} not installed here: {error}", file=sys.stderr)
            return 1
        return run(arguments)
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (errors.TesseraClientError, OSError) as error:
        print(f"tessera {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        print(f"tessera {options.command}: interrupted", file=sys.stderr)
        return 130


def exit_code(error: Exception) -> int:
    """The exit code that stands for an error."""
    if isinstance(error, errors.InvalidRequest):
        return 2
    if isinstance(error, (errors.ConnectionFailed, errors.Unavailable)):
        return 3
    return 4 if isinstance(error, errors.DeadlineExceeded) else 1


ELSEWHERE = {
    "serve": ("start the server; `tessera serve --help` lists its options", "the server's package is"),
    "check": (
        "say whether a checkpoint can be served: tessera check DIR, and any option of serve",
        "the server's package is",
    ),
    "gateway": ("open servers to OpenAI's clients; `tessera gateway --help` lists its options", "its packages are"),
    "quantize": ("make a smaller checkpoint; `tessera quantize --help` lists its options", "the server's packages are"),
}
"""The commands whose packages need not be here, which have their own parsers: what they do, and what they need."""


def _elsewhere(name: str) -> Callable[[list[str]], int]:
    if name == "gateway":
        from tessera_gateway.cli import gateway_main

        return gateway_main
    if name == "quantize":
        from tessera_quantize.cli import quantize_main

        return quantize_main
    from tessera.launcher.cli import serve_main
    from tessera_gateway.settings import add_options

    def serve(arguments: list[str]) -> int:
        if name == "check":
            named = ["--checkpoint"] if arguments and not arguments[0].startswith("-") else []
            arguments = ["--check", *named, *arguments]
        return serve_main(arguments, add_options)

    return serve


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tessera", description="Questions about pictures, served by tritonserver.")
    parser.add_argument("--version", action="version", version=f"tessera {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (text, _) in ELSEWHERE.items():
        commands.add_parser(name, help=text, add_help=False)
    ask.add(commands)
    jobs.add_batch(commands)
    jobs.add_audit(commands)
    jobs.add_parse(commands)

    add = command(commands, "recall", _recall, "measure how often the served model is right")
    add("--folder", type=Path, help="your own pictures: a folder with labels.csv (file,question,...)")
    sampling(add)
    _dataset(add)

    add = command(commands, "plan", _plan, "measure tile policies and recommend the fastest that costs little recall")
    own = "your own pictures: a folder with labels.csv (file,question,...), or an earlier run's JSON to look at again"
    add("folder", nargs="?", type=Path, help=f"{own}; without it the held-out set")
    each = "once for each policy to measure, as in --policy native --policy budget,token_budget=512"
    add("--policy", action="append", type=_policy, metavar="NAME[,KEY=VALUE]...", help=each)
    allowed = "recall that speed may cost, in percent (%(default)g)"
    add("--max-loss", type=_points, default=1.0, metavar="POINTS", help=allowed)
    add("--plot", type=Path, metavar="FILE.svg", help="draw recall against questions a minute")
    add("--machine", metavar="TEXT", help="what the server runs on: said in the JSON and the plot")
    add(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="longest answer in tokens (96; of a cascade 16, the most that has a margin)",
    )
    _dataset(add)
    share = "plan a cascade instead: what share of the answers may differ from the full cut's, as in 1%%"
    add("--disagree", type=_share, metavar="SHARE", help=f"{share}; of labels.csv file and question are enough")
    add("--confidence", type=_share, metavar="SHARE", help="how sure that must be (95%%)")
    add("--first", type=_policy, metavar="POLICY", help="the cascade's cheap cut (the model's cheapest)")
    add("--full", type=_policy, metavar="POLICY", help="its full cut (the server's own policy)")
    add("--choices", type=labels, metavar="A,B,...", help="the questions are answered with the likeliest of these")
    every = "hold the bound for each question with enough pictures by itself"
    add("--each-question", action="store_true", default=None, help=every)

    add = command(commands, "status", _status, "say whether the server is ready and which models it has")
    add("--probe", action="store_true", help="ask for one token too: ready is not always true")
    add("--json", action="store_true")
    port = "the health port of `tessera serve` (default: TESSERA_HEALTH_URL, else port 8003 of the same host)"
    add("--health-url", help=port)
    sample.add(commands)
    commands.metavar = f"{{{','.join(commands.choices)}}}"
    return parser


def _dataset(add: Callable[..., Any]) -> None:
    add("--limit", type=positive, metavar="N", help="only N questions, evenly over the classes")
    add("--concurrency", type=positive, default=16, metavar="N", help="requests at a time (%(default)s)")
    add("--cache", type=Path, metavar="DIR", help="keep the rendered pictures here for the next run")
    add("--repository", type=Path, metavar="DIR", help="the Tessera checkout, if not found from here")


def _points(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"must be between 0 and 100, got {value}")
    return value


def _share(text: str) -> float:
    value = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, or 0% and 100%, got {text}")
    return value


def _policy(text: str) -> str:
    try:
        plan.parse_policy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _recall(options: argparse.Namespace) -> int:
    with _asking(options) as (client, items), progress("asking") as advance:
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
    supervised = terminal.supervised(options.url)
    result["weights"] = dict(supervised.weights) if supervised else {}
    recall.print_table(result, console())
    print(json.dumps(result))
    first = next((outcome.error for outcome in outcomes if outcome.error), None)
    if first:
        print(f"tessera recall: {result['errors']} questions failed; the first: {first}", file=sys.stderr)
    return 1 if first else 0


CASCADES, POLICIES = ("confidence", "first", "full", "choices", "each_question"), ("policy", "plot", "machine")
"""What `tessera plan` takes with --disagree, and without."""


def _plan(options: argparse.Namespace) -> int:
    for name in POLICIES if options.disagree else CASCADES:
        if getattr(options, name) is not None:
            words = "does not go with" if options.disagree else "needs"
            raise errors.InvalidRequest(f"--{name.replace('_', '-')} {words} --disagree")
    if options.disagree:
        return _plan_cascade(options)
    if options.folder and options.folder.is_file():
        measured, about = plan.read_document(options.folder)
    else:
        data = options.folder.resolve().name if options.folder else "the held-out set"
        about = {"concurrency": options.concurrency, "url": options.url, "data": data}
        measured = _measured(options)
    if options.machine:
        about["machine"] = options.machine
    plan.print_table(measured, options.max_loss, console())
    print(json.dumps(plan.document(measured, options.max_loss, **about), indent=1))
    for each in measured:
        if each.errors:
            print(f"tessera plan: {each.policy}: {each.errors} questions failed: {each.error}", file=sys.stderr)
    if options.plot:
        options.plot.write_text(plan.plot(measured, options.max_loss, about), encoding="utf-8")
    return 1 if any(each.errors for each in measured) else 0


def _plan_cascade(options: argparse.Namespace) -> int:
    first, full = (policy and plan.parse_policy(policy) for policy in (options.first, options.full))
    disagree, confidence = options.disagree, options.confidence or 0.95
    asked = {"choices": options.choices} if options.choices else {"max_tokens": options.max_tokens or MOST_TOKENS}
    if asked.get("max_tokens", 0) > MOST_TOKENS and (first is None or options.each_question):
        words = f"answers of more than {MOST_TOKENS} tokens have no margin, by which some would go on to the full cut"
        raise errors.InvalidRequest(words, "name the cut that all are to get by --first, without --each-question")
    with _asking(options, answers=False) as (client, found):
        items = cascade.one_a_picture(found, options.limit)
        cascade.check_enough(len(items), disagree, confidence)
        about = {"asked": asked, "model": asdict(client.served()), "tritonserver": client.status().version}
        with progress("asking") as advance:
            settings = asked | {"concurrency": options.concurrency}
            pairs = cascade.ask_both(client, items, first, full, progress=advance, **settings)
    policy = cascade.plan(pairs, disagree, confidence, bool(options.each_question))
    cascade.print_plan(policy, console())
    print(json.dumps(cascade.document(policy, first, full, about)))
    return 0


def _measured(options: argparse.Namespace) -> list[plan.Measurement]:
    run = secrets.token_hex(8)
    settings = {"concurrency": options.concurrency, "max_tokens": options.max_tokens or 96}
    measured = []
    with _asking(options) as (client, items):
        for policy in options.policy or plan.DEFAULT_POLICIES:
            with progress(policy) as advance:
                measured.append(plan.measure(client, items, policy, run, progress=advance, **settings))
    return measured


@contextmanager
def _asking(options: argparse.Namespace, answers: bool = True) -> Iterator[tuple[Client, list[Item]]]:
    """A client, and the questions of the user's folder, or of the held-out set, whose pictures are kept in --cache, or
    for this run alone; raises where the server is not ready for them. Without ``answers`` those may be missing, and
    --limit is the caller's."""
    limit = options.limit if answers else None
    with ExitStack() as stack:
        client = stack.enter_context(Client(options.url, timeout=options.timeout))
        items = folder_items(options.folder, limit, answers=answers) if options.folder else None
        if not client.ready():
            client.status()  # says why, if it can
            raise errors.Unavailable(f"the server at {client.url} is not ready", "see `tessera status`")
        if items is None:
            kept = options.cache or stack.enter_context(tempfile.TemporaryDirectory(prefix="tessera-recall-"))
            with progress("rendering") as advance:
                items = heldout_items(options.limit, Path(kept), root=options.repository, progress=advance)
        yield client, items


def _status(options: argparse.Namespace) -> int:
    """Asks the launcher first: tritonserver itself calls a model ready whose process died."""
    supervised = terminal.supervised(options.url, options.health_url)
    if supervised is not None and not supervised.ready:
        _print_status(options, supervised, None, False)
        return 3
    with Client(options.url, timeout=min(options.timeout, 30.0)) as client:
        status = client.status()
        ready = client.ready()
        if ready and options.probe:
            client.ask(None, "Hello", max_tokens=1)
    _print_status(options, supervised, status, ready)
    return 0 if ready else 3


def _print_status(
    options: argparse.Namespace, supervised: terminal.Health | None, status: ServerStatus | None, ready: bool
) -> None:
    if options.json:
        page = {**(asdict(status) if status else {}), "ready": ready}
        print(json.dumps(page | ({"health": asdict(supervised)} if supervised else {})))
        return
    state = "ready" if ready else supervised.state if supervised and supervised.state != "ready" else "not ready"
    version = f", tritonserver {status.version}" if status else ""
    print(f"{options.url}: {state}{version}")
    if supervised is not None:
        why = f", the last because {supervised.reason}" if supervised.restarts and supervised.reason else ""
        print(f"  {supervised.state} since {supervised.since}, restarts {supervised.restarts}{why}")
        if supervised.state == "failed":
            print(f"  {supervised.reason}")
        for stage in supervised.stages:
            ping = "" if stage.last_ping_ms is None else f", answered a ping in {stage.last_ping_ms:.1f} ms"
            print(f"  {stage.name:<20} {'alive' if stage.alive else 'DEAD'}, process {stage.pid}{ping}")
        for stage_name, words in supervised.weights.items():
            print(f"  {stage_name:<20} {words}")
        if supervised.alarm:
            print(f"  not as planned: {supervised.alarm}")
    for model in status.models if status else ():
        print(f"  {model.name:<20} {model.version or '-':<3} {model.state or 'UNLOADED'} {model.reason}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
