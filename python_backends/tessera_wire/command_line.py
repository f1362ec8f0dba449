"""The parser of every `tessera` command: refuses in one line, and says what may have been meant.

What somebody may have meant who wrote a name that does not exist.

"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without the page of usage before each error; commands below it are of this class too."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Leaves nothing over: what is unknown is refused here, where its neighbours are known, and before what is
        missing, which may be the same word spelled wrong."""
        given = list(sys.argv[1:] if args is None else args)
        for word in given:
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                break  # what follows are values, or is for the command
            if self._is_unknown(word):
                name = word.partition("=")[0]
                hint = close(name.replace("_", "-"), self._option_string_actions, 0.6)
                self.error(f"there is no option {name}{hint}")
        found, rest = super().parse_known_args(given, namespace)
        if rest:
            self.error(f"unexpected: {' '.join(rest)} (words with spaces between belong in quotes)")
        return found, rest

    def _is_unknown(self, word: str) -> bool:
        """Whether argparse would take it for an option, as it takes no negative numbers and nothing with a space."""
        name = word.partition("=")[0]
        if len(word) < 2 or word[0] != "-" or " " in word or re.fullmatch(r"-\d*\.?\d+", word):
            return False
        known = self._option_string_actions
        if name.startswith("--"):
            return not any(each.startswith(name) for each in known)  # the beginning of one will do
        return word[:2] not in known

    def error(self, message: str) -> NoReturn:
        """One line, and the exit code 2."""
        if match := CHOICE.search(message):
            word, known = match[1], re.findall(r"[\w.-]+", match[2])
            is_command = message.startswith("argument {")
            message = (
                f"there is no command {word}{nearest(word, known)}" if is_command else message + close(word, known)
            )
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


MOST_NEIGHBOURS = 1000
"""Files of a folder that are looked through: among millions it would take seconds."""


def close(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """The end of a refusal: "; did you mean X?", or empty where nothing known is like it."""
    found = difflib.get_close_matches(name, list(known), 1, cutoff)
    return f"; did you mean {found[0]}?" if found else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a refusal: what may have been meant, else all there is."""
    names = list(known)
    return close(name, names) or f"; known are {', '.join(sorted(names))}"


def missing(path: str | Path) -> str:
    """The refusal of a path where nothing is: where it was looked for, and what there is that is called like it."""
    full = Path(path).absolute()
    try:
        with os.scandir(full.parent) as entries:
            hint = close(full.name, [entry.name for entry in islice(entries, MOST_NEIGHBOURS)], 0.7)
    except OSError:
        hint = f"; there is no folder {full.parent} either"
    where = "" if str(full) == str(path) else f" (looked for {full})"
    return f"there is no file or folder {path}{where}{hint}"
