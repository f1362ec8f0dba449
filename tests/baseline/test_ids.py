"""Every test by its function's name and the ids of its parameters, wherever its file lies: none may get lost in moves.

    python tests/baseline/test_ids.py            # what is gone and what is new against test_ids.txt
    python tests/baseline/test_ids.py --write    # takes today's as the baseline
    python tests/baseline/test_ids.py --print

Leaves with issue 33, as does this folder.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORED = Path(__file__).with_suffix(".txt")
NODE = re.compile(r"^\S+\.py::(?:\w+::)*?(\w+(?:\[.*\])?)$")


def collected() -> list[str]:
    """Sorted names, those of several equal tests as often; those of `make test-clients` and of GPUs too."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=--strict-markers"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = sorted(found[1] for line in said.stdout.splitlines() if (found := NODE.match(line)))
    total = re.search(r"^(\d+) tests collected", said.stdout, re.MULTILINE)
    if said.returncode or total is None or int(total[1]) != len(names):
        raise SystemExit(f"the tests could not be collected ({len(names)} were):\n{said.stdout[-3000:]}{said.stderr}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true")
    what.add_argument("--print", action="store_true")
    what.add_argument("--compare", action="store_true", help="which is the default")
    options = parser.parse_args()
    names = collected()
    text = "".join(f"{name}\n" for name in names)
    if options.print:
        print(text, end="")
        return 0
    if options.write:
        STORED.write_text(text, encoding="utf-8")
        return 0
    now, before = Counter(names), Counter(STORED.read_text(encoding="utf-8").splitlines())
    gone, new = sorted((before - now).elements()), sorted((now - before).elements())
    for sign, those in (("-", gone), ("+", new)):
        print("".join(f"{sign} {name}\n" for name in those), end="")
    print(f"{before.total()} before, {now.total()} now: {len(gone)} gone, {len(new)} new")
    return int(bool(gone))


if __name__ == "__main__":
    raise SystemExit(main())
