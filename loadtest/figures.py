"""A benchmark's figure as one JSON line, with what is needed to take it again.

A benchmark prints its lines; record.py keeps the newest of each metric in results/metrics.jsonl: a line of what the
figures of one run have in common (RUN), and behind it a line of each. The documents' tables are generated from that
file (report.py). The first lines are the sets of versions, by a name of their own, for there are few.
"""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "loadtest" / "results" / "metrics.jsonl"
RUN = ("command", "machine", "versions", "commit", "date")
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "onnxruntime",
    "tokenizers",
    "numpy",
    "opencv-python-headless",
    "nvidia-pytriton",
)


def emit(
    metric: str, value: float, unit: str, command: str | None = None, ceiling: float | None = None, **notes: object
) -> None:
    """Prints one figure.

    Args:
        metric: a dotted name, for instance ``cpu.ratio_distinct``.
        value: the figure, in `unit`.
        command: what a reader runs to take it again; None: this program with its arguments.
        ceiling: the best this machine could do, where that is known.
        notes: anything else that belongs to the figure (sample size, settings).
    """
    line = {
        "metric": metric,
        "value": value,
        "unit": unit,
        "ceiling": ceiling,
        "command": command or own_command(),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        **notes,
    }
    print(json.dumps(line), flush=True)


def read(file: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The kept figures by their metrics, each with what its run has in common."""
    found: dict[str, dict[str, Any]] = {}
    run: dict[str, Any] = {}
    sets: dict[str, dict[str, str]] = {}
    for line in file.read_text().splitlines():
        part = json.loads(line)
        if "metric" in part:
            found[part["metric"]] = part | run
        elif "set" in part:
            sets[part["set"]] = part["versions"]
        else:
            run = part | {"versions": sets[part["versions"]]}
    return found


def write(figures: Iterable[Mapping[str, Any]], file: Path = RESULTS) -> None:
    """Keeps these, in the order of their runs' first ones."""
    sets: dict[str, str] = {}
    runs: dict[str, list[str]] = {}
    for figure in figures:
        own = {name: value for name, value in figure.items() if name not in RUN and value is not None}
        name = f"{zlib.crc32(json.dumps(figure['versions']).encode()):08x}"
        sets[name] = _line({"set": name, "versions": figure["versions"]})
        run = _line({**{name: figure[name] for name in RUN}, "versions": name})
        runs.setdefault(run, []).append(_line(own))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join([*sets.values(), *(line for run, lines in runs.items() for line in (run, *lines))]))


def _line(part: Mapping[str, Any]) -> str:
    return json.dumps(part, separators=(",", ":")) + "\n"


def rounded(value: float) -> str:
    """Five digits are more than any of these is good for."""
    return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"


def own_command() -> str:
    """What a reader runs to take this program's figures again."""
    given = shlex.join(sys.argv[1:])
    return f"make bench NAME={Path(sys.argv[0]).stem}" + f' ARGS="{given}"' * bool(given)


@cache
def machine() -> str:
    """The GPU, or the processor where there is none, and the cores that this process may use."""
    cores = f"{len(os.sched_getaffinity(0))} cores"
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
        return f"{gpu}, {cores}"
    except (OSError, subprocess.CalledProcessError, IndexError):
        pass
    try:
        text = Path("/proc/cpuinfo").read_text()
        model = next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {cores}"


@cache
def versions() -> dict[str, str]:
    """Python's and the installed packages' versions."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def commit() -> str | None:
    """TESSERA_COMMIT, or the checked-out commit, marked when the tree differs from it; None outside a git checkout."""
    if told := os.environ.get("TESSERA_COMMIT"):  # a carried tree may lie in another checkout
        return told
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
