"""The command ``tessera ask``: one question, with or without pictures."""

import argparse
import json
import os.path
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tessera_client.client import Client
from tessera_client.messages import LabelScore
from tessera_command.terminal import command, labels, sampling
from tessera_wire.command_line import missing
from tessera_wire.errors import InvalidRequest

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".pdf")
"""How a word ends that is no question, whether or not there is such a file."""


def add(commands: Any) -> None:
    """Adds the command to the others."""
    add = command(commands, "ask", run, "ask one question about pictures")
    add("picture", nargs="*", help="JPEG, PNG or WebP files; none for a question without a picture")
    add("question")
    add("--stream", action="store_true", help="print the answer as it is written")
    sampling(add)
    add("--temperature", type=float, help="0, the default, is greedy")
    add("--seed", type=int)
    add("--choices", type=labels, metavar="A,B,...", help="answer with the likeliest of these; shows all scores")
    add("--json", action="store_true", help="print the whole answer with usage and timings as JSON")


def run(options: argparse.Namespace) -> int:
    _check(options.picture, options.question)
    sampling = {name: getattr(options, name) for name in ("max_tokens", "max_tiles", "temperature", "seed", "choices")}
    question = (options.picture, options.question)
    with Client(options.url, timeout=options.timeout) as client:
        if options.stream and not options.json:
            with client.stream(*question, **sampling) as stream:
                for delta in stream:
                    print(delta.text, end="", flush=True)
                answer = stream.answer()
            print()
        else:
            answer = client.ask(*question, **sampling)
            print(json.dumps(asdict(answer), ensure_ascii=False) if options.json else answer.text)
    if answer.choices and not options.json:
        print(_table(answer.choices), file=sys.stderr)
    return 0


def _check(pictures: Sequence[str], question: str) -> None:
    """Raises InvalidRequest for a picture that is not there, and for one in the question's place."""
    named = " " not in question and question.lower().endswith(PICTURES)
    if named or not question.strip() or os.path.isfile(question):
        shown = " ".join(map(shlex.quote, filter(str.strip, (*pictures, question))))
        example = f'tessera ask {shown} "What is in this picture?"'
        raise InvalidRequest(f"there is no question: it is the last word, here {question!r}", f"for instance {example}")
    for picture in pictures:
        if not picture.startswith("data:") and not os.path.exists(picture):
            raise InvalidRequest(missing(picture))


def _table(choices: Sequence[LabelScore]) -> str:
    width = max(len("label"), *(len(score.label) for score in choices))
    head = f"{'label':{width}}  probability  normalized"
    return "\n".join(
        [head, *(f"{score.label:{width}}  {score.probability:11.4f}  {score.normalized:10.4f}" for score in choices)]
    )
