"""The command ``tessera sample``: pictures to try the others on, without any of one's own."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from tessera_wire.errors import InvalidRequest

SAMPLES = Path(__file__).parent / "samples"
NEXT = {
    "rooms": (
        "12 pictures, with questions and answers in labels.csv",
        (
            'tessera ask {folder}/room-01.jpg "Is there damp in this picture?"',
            "tessera plan {folder}",
            'tessera batch {folder} --prompt "Is there a crack?" -o out.jsonl',
        ),
    ),
    "documents": ("a page of a document", ("tessera parse {folder} -o out/",)),
}
"""Of each model that comes with the source: what there is for it, and what to do with that."""


def add(commands: Any) -> None:
    """Adds the command to the others. It asks no server."""
    text = "write pictures with questions to try the other commands on"
    parser = commands.add_parser("sample", help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=run)
    parser.add_argument("folder", type=Path, help="is made where it does not exist; no file of yours is overwritten")
    which = "for which model of `tessera serve --default`: pictures of rooms, or a page to parse (%(default)s)"
    parser.add_argument("--default", choices=NEXT, default="rooms", help=which)


def run(options: argparse.Namespace) -> int:
    folder, samples = options.folder, sorted((SAMPLES / options.default).iterdir())
    contents = {folder / sample.name: sample.read_bytes() for sample in samples}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            if file.exists() and file.read_bytes() != content:
                raise InvalidRequest(f"{file} is there already, and is another file", "give another folder")
        for file, content in contents.items():
            file.write_bytes(content)
    except OSError as error:
        raise InvalidRequest(f"cannot write to {folder}: {error.strerror}", "give another folder") from error
    what, then = NEXT[options.default]
    print(
        f"{folder}: {what}. For instance:", *(line.format(folder=shlex.quote(str(folder))) for line in then), sep="\n  "
    )
    return 0
