"""Which mutants of mutants.json today's tests kill.

    python tests/baseline/run_mutants.py --tree . --jobs 16 --out results.json [--only m003 m017] [--against old.json]

First the chosen tests run on the unchanged tree: those that fail there (a package is missing, say) judge no mutant.
Each job has a copy of the tree, its large files as hard links. No GPU is seen.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from make_mutants import MUTANTS, Tree, read

LIMIT_S = 120
LARGE = 1_000_000  # bytes
PATHS = ("python_backends", "clients", "build/default_model", "build/document_model", "loadtest", "build", "tests")
FIRST = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another file system
        return False
    return True


class Tests:
    """Where the test functions are today, by file name and function."""

    def __init__(self, tree: Path) -> None:
        self._found: dict[str, list[str]] = defaultdict(list)
        for path in sorted((tree / "tests").rglob("test_*.py")):
            name = path.relative_to(tree).as_posix()
            for node in ast.parse(path.read_text()).body:
                in_class = isinstance(node, ast.ClassDef)
                for function in node.body if in_class else [node]:
                    found = getattr(function, "name", "")
                    if found.startswith("test"):
                        self._found[found].append("::".join([name, *([node.name] if in_class else []), found]))

    def ids(self, chosen: dict[str, list[str]]) -> list[str]:
        """Of the file of that name; of any, where no such file has it any more."""
        ids = []
        for file, functions in chosen.items():
            for function in functions:
                found = self._found[function]
                near = [i for i in found if i.partition("::")[0].endswith("/" + file)]
                ids += near or found
        return list(dict.fromkeys(ids))


class Copy:
    """A tree of its own for one job; `with_file` changes one file in it."""

    def __init__(self, tree: Path, root: Path, number: int) -> None:
        self.root, self._tree = root / f"job{number}", tree
        self._stamp = int(time.time()) + 1000 * number
        for folder, folders, files in os.walk(tree):
            folders[:] = [f for f in folders if not f.startswith(".") and f not in ("__pycache__", "shared")]
            into = self.root / Path(folder).relative_to(tree)
            into.mkdir(parents=True)
            for name in files:
                source = Path(folder) / name
                if source.stat().st_size < LARGE or not _linked(source, into / name):
                    shutil.copy2(source, into / name)
        self._work = root / f"work{number}"

    def pytest(self, ids: list[str], *more: str, limit: float = LIMIT_S) -> tuple[int | None, str, float]:
        """(exit status, None if it ran past the limit; what it printed; seconds)"""
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir()
        env = os.environ | {
            "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(self._work), "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([*(str(self.root / p) for p in PATHS), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *more, *ids]
        begin = time.monotonic()
        with open(self._work / "out", "w+") as out:
            process = subprocess.Popen(command, cwd=self.root, env=env, stdout=out, stderr=out, start_new_session=True)
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it left running, too
            process.wait()
            out.seek(0)
            return status, out.read(), time.monotonic() - begin

    def with_file(self, path: str, source: str, ids: list[str], limit: float) -> tuple[int | None, str, float]:
        target = self.root / path
        self._stamp += 1
        target.unlink()
        target.write_text(source)
        os.utime(target, (self._stamp, self._stamp))  # a compiled file is told by its second
        try:
            return self.pytest(ids, "-x", limit=limit)
        finally:
            target.unlink()
            shutil.copy2(self._tree / path, target)


def functions(printed: str) -> list[str]:
    """The tests that failed, as `file::function`; the file alone where it could not be imported."""
    found = []
    for name in FIRST.findall(printed):
        path, *inner = name.split("::")
        found.append("::".join([path.rsplit("/", 1)[-1], *(i.partition("[")[0] for i in inner[-1:])]))
    return list(dict.fromkeys(found))


def judged(mutant: dict, tree: Tree, tests: Tests, bad: set[str], copy: Copy, limit: float) -> dict:
    row = {"id": mutant["id"], "package": mutant["package"], "operator": mutant["operator"]}
    written = tree.mutated(mutant)
    if written is None:
        return row | {"result": "gone"}
    kept = {
        f: left
        for f, names in mutant["tests"].items()
        if (left := [n for n in names if f"{f}::{n}" not in bad and f not in bad])
    }
    row |= {"path": written[0]}
    ids = tests.ids(kept)
    if not ids:
        return row | {"result": "no test here" if mutant["tests"] else "not covered"}
    status, printed, seconds = copy.with_file(*written, ids, limit)
    row |= {"seconds": round(seconds, 1), "tests": len(ids)}
    if status is None:
        return row | {"result": "timeout"}
    if status == 0:
        return row | {"result": "survived"}
    if status == 5:
        return row | {"result": "no test here"}
    killer = (functions(printed) or [f"exit status {status}: {printed[-300:]}"])[0]
    return row | {"result": "killed", "by": killer}


def unchanged(mutants: list[dict], tests: Tests, copies: queue.Queue[Copy], jobs: int) -> tuple[set[str], list[str]]:
    """(the chosen tests that fail without a mutant, what could not be told)"""
    chosen = sorted({(file, name) for m in mutants for file, names in m["tests"].items() for name in names})
    size = max(10, min(40, len(chosen) // (3 * jobs)))

    def run(part: list[tuple[str, str]]) -> tuple[set[str], list[str]]:
        wanted: dict[str, list[str]] = defaultdict(list)
        for file, name in part:
            wanted[file].append(name)
        unknown = [f"{f}::{n} is no test any more" for f, n in part if not tests.ids({f: [n]})]
        ids = tests.ids(wanted)
        if not ids:
            return set(), unknown
        copy = copies.get()
        try:
            status, printed, _ = copy.pytest(ids, "--continue-on-collection-errors")
        finally:
            copies.put(copy)
        if status in (0, 5):
            return set(), unknown
        failed = set(functions(printed)) if status == 1 else set()
        if failed:
            return failed, unknown
        # it hung or crashed: nothing of it judges
        return {f"{f}::{n}" for f, n in part}, [*unknown, f"{list(wanted)}: status {status}: {printed[-400:]}"]

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(run, [chosen[at : at + size] for at in range(0, len(chosen), size)]))
    return set().union(*(r[0] for r in results)), [line for r in results for line in r[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=MUTANTS.parents[2])
    parser.add_argument("--mutants", type=Path, default=MUTANTS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for the tests of one mutant")
    parser.add_argument("--first", type=int)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--against", type=Path, help="an older result: say which it killed and this one does not")
    options = parser.parse_args()
    begin = time.monotonic()
    root = options.tree.resolve()
    mutants = [m for m in read(options.mutants) if not options.only or m["id"] in options.only][: options.first]
    tree, tests, lock = Tree(root), Tests(root), threading.Lock()
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(options.jobs):
            copies.put(Copy(root, Path(folder), number))
        bad, unclear = unchanged(mutants, tests, copies, options.jobs)
        clean_s = round(time.monotonic() - begin)
        print(
            f"{len(bad)} chosen tests fail on the unchanged tree ({clean_s} s):",
            *sorted(bad),
            *unclear,
            sep="\n  ",
            flush=True,
        )

        def save() -> None:
            seconds = round(time.monotonic() - begin)
            whole = {"seconds": seconds, "clean_seconds": clean_s, "bad": sorted(bad), "unclear": unclear}
            options.out.write_text(json.dumps(whole | {"mutants": sorted(rows, key=lambda r: r["id"])}, indent=1))

        def run(mutant: dict) -> None:
            copy = copies.get()
            try:
                row = judged(mutant, tree, tests, bad, copy, options.limit)
            except Exception as error:  # one mutant must not end a run of minutes
                row = {"id": mutant["id"], "result": f"error: {error!r}"}
            finally:
                copies.put(copy)
            with lock:
                rows.append(row)
                save()
                print(*(row.get(k, "") for k in ("id", "result", "seconds", "by")), flush=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(run, mutants))
    counts = Counter(r["result"] for r in rows)
    print(dict(counts), f"in {time.monotonic() - begin:.0f} s")
    if options.against:
        killed = {
            r["id"]: r.get("by", "timeout")
            for r in json.loads(options.against.read_text())["mutants"]
            if r["result"] in ("killed", "timeout") and r["id"] in {m["id"] for m in mutants}
        }
        now = {r["id"]: r["result"] for r in rows}
        lost = {
            i: f"{now.get(i)} (was killed by {by})"
            for i, by in killed.items()
            if now.get(i) not in ("killed", "timeout")
        }
        print(f"{len(killed)} were killed; no longer: {len(lost)}", json.dumps(lost, indent=1))


if __name__ == "__main__":
    main()
