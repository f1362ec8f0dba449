"""`make fuzz`: random bad requests against a server of its own, mixed with good ones whose answers must not change.

Each run has its own seed, which it prints; an offending input is kept as a file and can be sent again with --replay.
Ends with 1 at any INTERNAL error, hang, message that tells too much, dead stage or changed answer.
"""

import argparse
import secrets
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import figures
import numpy as np

from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server

sys.path.insert(0, str(figures.ROOT / "tests"))
from faults.asking import Crowd, GrpcAsker, HttpAsker, Outcome, complaint
from faults.badinputs import Inputs, mutant, odd_but_good

GOOD = [odd_but_good()[name] for name in ("jpeg", "png alpha", "webp", "no image")]
PROGRESS_SECONDS = 10.0


class Fuzz:
    """Sends inputs number 0, 1, 2, ... of a seed from several threads, and keeps what went wrong."""

    def __init__(self, server: Server, seed: int, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.refused: list[tuple[float, str]] = []
        self.failures = 0
        self.stop = threading.Event()
        self._server, self._seed, self._folder = server, seed, folder
        self._lock = threading.Lock()
        self._next = 0

    def work(self, number: int) -> None:
        """One thread: every second one over HTTP. A stream that hung is left for a new one."""
        asker = self._asker(number)
        while not self.stop.is_set():
            with self._lock:
                index, self._next = self._next, self._next + 1
            inputs = mutant(self._seed, index)
            try:
                outcome = asker.ask(inputs.tensors)
            except Exception as error:
                outcome = Outcome("CLIENT", f"{type(error).__name__}: {error}", 0.0)
            self.note(inputs, outcome)
            if outcome.status in ("HANG", "CLIENT"):
                asker.close()
                asker = self._asker(number)
        asker.close()

    def note(self, inputs: Inputs, outcome: Outcome) -> None:
        """Counts an outcome; keeps the input if the outcome is a fault of ours."""
        wrong = None if outcome.fine else f"{outcome.status}: {outcome.text[:300]}"
        if outcome.status == "INVALID_ARGUMENT":
            wrong = complaint(outcome.text)
        with self._lock:
            self.counts[outcome.status] += 1
            if outcome.status == "INVALID_ARGUMENT":
                self.refused.append((outcome.seconds, inputs.name))
            if wrong is None:
                return
            self.failures += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{inputs.name.replace(' ', '-')}.json"
        path.write_text(inputs.to_json())
        print(f"{inputs.name}: {wrong}; kept as {path}", flush=True)

    def _asker(self, number: int) -> GrpcAsker | HttpAsker:
        return GrpcAsker(self._server.grpc_url) if number % 2 else HttpAsker(self._server.http_url)


def run(server: Server, fuzz: Fuzz, minutes: float, concurrency: int) -> list[str]:
    """Fuzzes for a time, or until a stage dies; returns what else went wrong."""
    before = server.stub_pids()
    threads = [threading.Thread(target=fuzz.work, args=(number,)) for number in range(concurrency)]
    with Crowd([GrpcAsker(server.grpc_url), HttpAsker(server.http_url)], GOOD) as crowd:
        end = time.monotonic() + 60 * minutes
        for thread in threads:
            thread.start()
        while (left := end - time.monotonic()) > 0 and server.failure() is None:
            time.sleep(min(PROGRESS_SECONDS, left))
            print(
                f"{max(0, end - time.monotonic()):.0f} s left: {sum(fuzz.counts.values())} inputs {dict(fuzz.counts)}, "
                f"{fuzz.failures} failures, {crowd.asked} good requests",
                flush=True,
            )
        fuzz.stop.set()
        for thread in threads:
            thread.join()
    wrong = [f"a good answer changed: {change}" for change in crowd.changed]
    if (failure := server.failure()) or server.stub_pids() != before:
        wrong.append(failure or "a stage was replaced")
    return wrong


def replay(server: Server, paths: list[Path]) -> None:
    """Sends kept inputs again, over both ways, and prints what comes back."""
    for asker in (GrpcAsker(server.grpc_url), HttpAsker(server.http_url)):
        for path in paths:
            print(f"{path.name}: {asker.ask(Inputs.from_json(path.read_text()).tensors)}", flush=True)
        asker.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for offending inputs")
    parser.add_argument("--replay", type=Path, nargs="+", help="kept inputs to send again; nothing else is done")
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    repository = figures.ROOT / "model_repository"
    # Some inputs ask for an answer as long as there is room: 8,000 tokens take a CPU half a minute, which is no hang.
    ports, settings = dict(http_port=0, grpc_port=0, metrics_port=0), {"max_model_len": "1024"}
    with Server(ServerOptions(repository, **ports, settings=settings)) as server:
        if arguments.replay:
            replay(server, arguments.replay)
            return 0
        print(f"seed {seed}", flush=True)
        fuzz = Fuzz(server, seed, arguments.keep)
        wrong = run(server, fuzz, arguments.minutes, arguments.concurrency)
    for line in wrong[:20]:
        print(line)
    failures = fuzz.failures + len(wrong)
    command = f'make fuzz ARGS="--minutes {arguments.minutes:g} --concurrency {arguments.concurrency} --seed {seed}"'
    slowest = max(fuzz.refused, default=(0.0, ""))
    p99 = float(np.percentile([seconds for seconds, _ in fuzz.refused] or [0.0], 99))
    inputs = sum(fuzz.counts.values())
    refusals = {"refused_p99_s": round(p99, 3), "refused_slowest_s": round(slowest[0], 3), "slowest": slowest[1]}
    figures.emit("fuzz.inputs", inputs, "count", command, **refusals, outcomes=dict(fuzz.counts))
    figures.emit("fuzz.failures", failures, "count", command, inputs=inputs)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
