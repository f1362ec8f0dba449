"""Runs the quick tests under coverage, one process a file, and gives each mutant the tests that execute it.

    python tests/baseline/map_tests.py --jobs 16 --out mutants.json

Left out: what starts a real tritonserver, a browser or an attack, and benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from make_mutants import HERE, MUTANTS, Tree, cover, read, write
from run_mutants import PATHS

LEFT_OUT = {"server", "faults", "gpu", "page", "deploy", "contract", "loadtest", "tensorrt", "build", "baseline"}
LIMIT_S = 100  # of a file; what it has covered by then counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--mutants", type=Path, default=MUTANTS)
    parser.add_argument("--out", type=Path, default=MUTANTS)
    parser.add_argument("--tests", type=Path, nargs="*", help="these files only")
    options = parser.parse_args()
    begin = time.monotonic()
    root = HERE.parents[1]
    files = [p.relative_to(root) for p in (root / "tests").rglob("test_*.py") if p.parent.name != "tests"]
    files = [p for p in files if p.parts[1] not in LEFT_OUT] + [
        p.relative_to(root) for p in (root / "tests").glob("test_*.py")
    ]
    # the longest first, told by their size
    files = sorted(options.tests or files, key=lambda p: -(root / p).stat().st_size)
    with tempfile.TemporaryDirectory(prefix="covered") as folder:

        def run(numbered: tuple[int, Path]) -> str:
            number, file = numbered
            temporary = Path(folder) / f"tmp{number}"
            temporary.mkdir()
            env = os.environ | {
                "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1", "TMPDIR": str(temporary), "COVERAGE_CORE": "ctrace",
                "COVERED": f"{folder}/times{number}", "COVERAGE_FILE": f"{folder}/data{number}",
                "PYTHONPATH": os.pathsep.join(
                    [*(str(root / p) for p in PATHS), str(HERE), os.environ.get("PYTHONPATH", "")]
                ),
            }  # fmt: skip
            command = [sys.executable, "-m", "coverage", "run", f"--rcfile={HERE / 'coveragerc'}", "-m", "pytest", "-q"]
            command += ["--tb=no", "-rfE", "-p", "covered", "-p", "no:cacheprovider", str(file)]
            command += ["-m", "not faults and not gpu and not clients and not server"]
            process = subprocess.Popen(
                command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip
            try:
                printed, _ = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # it writes what it has
                try:
                    printed, _ = process.communicate(timeout=20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    printed, _ = process.communicate()
            errors = [line for line in printed.splitlines() if line.startswith("ERROR")]
            return f"{file} {round(time.monotonic() - begin)} s " + "; ".join(errors[:2])

        with ThreadPoolExecutor(options.jobs) as pool:
            for line in pool.map(run, enumerate(files)):
                print(line, flush=True)
        times = Path(folder) / "times"
        times.write_text("".join(p.read_text() for p in Path(folder).glob("times?*")))
        slow = {r["test"] for r in map(json.loads, times.read_text().splitlines()) if r["outcome"] == "failed"}
        print(f"{len(slow)} tests slow or failing in {time.monotonic() - begin:.0f} s:", *sorted(slow), sep="\n  ")
        mutants = read(options.mutants)
        cover(mutants, Tree(root), sorted(Path(folder).glob("data*")), times)
        write(mutants, options.out)
    print("covered by no quick test:", *(m["id"] for m in mutants if not m["tests"]))
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
