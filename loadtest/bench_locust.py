"""What Locust itself can do: questions a second of several processes to servers that do nothing.

`make bench NAME=locust`; requirements-loadtest.txt must be installed, as `make loadtest` does. Above this rate a figure
of Locust's would be about Locust. W1 over gRPC, the pictures made before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import figures
from standin_server import standin


def rates(entry: dict[str, Any]) -> list[int]:
    """Answers in each whole second of an entry of Locust's statistics, without the first two and the last."""
    by_second = {int(second): count for second, count in entry["num_reqs_per_sec"].items()}
    return [by_second.get(second, 0) for second in range(min(by_second) + 2, max(by_second))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=max(2, (os.cpu_count() or 1) // 2), help="of Locust")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=20)
    options = parser.parse_args()
    with ExitStack() as ends:
        hosts = ",".join(ends.enter_context(standin()) for _ in range(options.processes))
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        command = [
            *(sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py")), "--headless"),
            *("--workload", "W1", "--stock", "64", "--again", "--users", str(options.users), "--host", hosts),
            *("--run-time", f"{options.seconds}s", "--processes", str(options.processes)),
            *("--json-file", str(folder / "stats"), "GrpcUser"),
        ]
        subprocess.run(command, check=True, timeout=options.seconds + 120)
        (entry,) = (each for each in json.loads((folder / "stats.json").read_text()) if each["method"] == "grpc")
    seconds = rates(entry)
    figures.emit(
        "loadtest.locust.req_s",
        round(statistics.mean(seconds), 1),
        "req/s",
        f"make bench NAME=locust ARGS='--processes {options.processes}'",
        processes=options.processes,
        users=options.users,
        seconds=len(seconds),
        slowest_second=min(seconds),
        failures=entry["num_failures"],
    )
    return int(entry["num_failures"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
