"""The Makefile stays short, and the documents name targets and benchmarks that exist."""

import re
from pathlib import Path

from bench import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
NAMED = re.compile(r"(?:^|`|    )make ([a-z][a-z-]*)(?: NAME=(\w+))?", re.MULTILINE)
# docs/figures.md has the commands of the past.
TEXTS = [
    *ROOT.glob("*.md"),
    *(path for path in (ROOT / "docs").glob("*.md") if path.name != "figures.md"),
    *(ROOT / "loadtest").rglob("*.py"),
    ROOT / ".ci" / "run",
]


def test_there_are_few_targets_and_each_has_a_rule():
    assert len(TARGETS) <= 13
    assert [target for target in TARGETS if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)] == []


def test_targets_and_benchmarks_that_are_named_exist():
    named = {(path.name, *found) for path in TEXTS for found in NAMED.findall(path.read_text())}
    assert {target for _, target, _ in named} >= {"demo", "test", "bench"}
    missing = [
        (file, target, name)
        for file, target, name in sorted(named)
        if target not in TARGETS or (name and name not in PROGRAMS)
    ]
    assert missing == []
