"""`tessera batch` through kills, and what it can do alone (`make bench NAME=batch`).

kills: a job of 20,000 small pictures with as many questions on the default model; at each seventh part of it one is
killed by SIGKILL, in turn: a stage, the server, the job itself, each twice (the job is then run again). A kill costs
all pauses of more than PAUSE_S between two results, from it to the next one.
``batch.lost`` are rows without an answer, ``batch.doubled`` ids that stand twice. Then the results of the last tenth
are taken away, and ``batch.resume_s`` is what a run takes from its start to its first new result.

alone: jobs of 10,000 and of 1,000,000 rows on a stand-in that answers at once (standin_server.py): rows/s, the most
memory of the job's process, and the same way to the first new result with 90% of the rows done.

    python loadtest/bench batch kills alone
    python loadtest/bench batch alone --rows 10000 100000
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import figures
from serving import Running, Setup, serve
from standin_server import standin
from workloads import picture

from tessera_command import terminal

CONCURRENCY = 32
PAUSE_S = 0.5
PICTURES = 64
SIDE = 112  # pixels
ORDER = ("stage", "server", "job")
STAGES = ("vision_encoder", "language_model")
TIMES = 2
POLL_S = 0.02
AWAY_S = 300.0


def write_rows(folder: Path, rows: int) -> Path:
    """This many rows about PICTURES pictures, no question twice."""
    for number in range(PICTURES):
        (folder / f"{number}.jpg").write_bytes(picture(SIDE, SIDE, number))
    path = folder / f"{rows}.jsonl"
    with open(path, "w") as file:
        for number in range(rows):
            question = f"Is there a crack in wall {number}?"
            file.write(
                json.dumps({"id": f"r{number}", "image": f"{number % PICTURES}.jpg", "question": question}) + "\n"
            )
    return path


class Job:
    """One run of the command, and how many results there are."""

    def __init__(self, url: str, rows: Path, out: Path, concurrency: int) -> None:
        command = [sys.executable, "-m", "tessera_command.cli", "batch", str(rows), "-o", str(out), "--url", url]
        command += ["--max-tokens", "2", "--max-tiles", "1", "--concurrency", str(concurrency)]
        paths = [str(figures.ROOT / folder) for folder in ("python_backends", "clients")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self._out, self._read, self._lines = out, 0, 0
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def results(self) -> int:
        """Whole lines so far."""
        if self._out.exists():
            with open(self._out, "rb") as file:
                file.seek(self._read)
                new = file.read()
            self._read += len(new)
            self._lines += new.count(b"\n")
        return self._lines

    def wait_for(self, results: int, since: float | None = None) -> float:
        """Returns when N results are there; all pauses of more than PAUSE_S until then, the first from ``since``
        (time.monotonic(); None: now).

        Raises RuntimeError where the job ends before, or no result comes for AWAY_S.
        """
        found, last, paused = self.results(), since or time.monotonic(), 0.0
        while found < results:
            ended = self.process.poll() is not None
            time.sleep(POLL_S)
            now, new = time.monotonic(), self.results()
            if new > found:
                paused += now - last if now > last + PAUSE_S else 0.0
                found, last = new, now
            elif ended or now > last + AWAY_S:
                raise RuntimeError(f"the job stands at {found} results; exit code {self.process.poll()}")
        return paused

    def end(self) -> tuple[int, float]:
        """The most memory it had, in bytes, and the processor's seconds; raises RuntimeError where it failed."""
        before, peak = resource.getrusage(resource.RUSAGE_CHILDREN), 0
        while self.process.poll() is None:
            with suppress(OSError, StopIteration):
                status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
                peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
            time.sleep(POLL_S)
        if self.process.returncode:
            raise RuntimeError(f"the job ended with {self.process.returncode}")
        assert self.process.stdout is not None
        print(self.process.stdout.read().strip(), file=sys.stderr, flush=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return peak * 1024, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Kill(NamedTuple):
    what: str
    at: int
    seconds_lost: float


def kills(server: Running, rows: Path, out: Path, total: int) -> list[Kill]:
    """Runs the job to its end through all kills."""
    planned = [each for _ in range(TIMES) for each in ORDER]
    job, done = Job(server.grpc[0], rows, out, CONCURRENCY), []
    parts = [total * number // (len(planned) + 1) for number in range(1, len(planned) + 2)]
    job.wait_for(parts[0])
    for number, (what, until) in enumerate(zip(planned, parts[1:], strict=True)):
        killed, stood = time.monotonic(), job.results()
        if what == "job":
            job.process.kill()
            job.process.wait()
            job = Job(server.grpc[0], rows, out, CONCURRENCY)
        else:
            os.kill(process_of(server, what, number), signal.SIGKILL)
        lost = job.wait_for(until, killed)
        done.append(Kill(what, stood, round(lost, 1)))
        rate = (job.results() - stood) / (time.monotonic() - killed - lost)
        print(f"killed the {what} at {stood}: {lost:.1f} s lost, else {rate:.1f} rows/s", file=sys.stderr, flush=True)
    job.end()
    return done


def process_of(server: Running, what: str, number: int) -> int:
    """The process id of tritonserver, or of one stage or the other in turn."""
    name = "tritonserver" if what == "server" else STAGES[number // len(ORDER) % len(STAGES)]
    page = terminal.ask(server.health)
    if page is None:
        raise RuntimeError(f"nobody answers at {server.health}")
    return next(stage.pid for stage in page.stages if stage.name.startswith(name))


def first_new(url: str, rows: Path, out: Path, total: int) -> float:
    """Takes the last tenth of the results away; seconds from a run's start to its first new one. Ends that run."""
    lines = out.read_bytes().splitlines(keepends=True)[: total * 9 // 10]
    out.write_bytes(b"".join(lines))
    job = Job(url, rows, out, CONCURRENCY)
    try:
        job.wait_for(len(lines) + 1)
        return time.monotonic() - job.started
    finally:
        job.process.kill()
        job.process.wait()


def judged(out: Path, total: int) -> dict[str, int]:
    """How many rows are without an answer, and how many ids stand twice."""
    ids: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    with open(out, "rb") as file:
        for line in file:
            row = json.loads(line)
            ids[row["id"]] += 1
            if row["answer"] is None:
                errors[row["error"]] += 1
    for error, count in errors.most_common(5):
        print(f"{count} x {error}", file=sys.stderr)
    missing = total - len(set(ids) & {f"r{number}" for number in range(total)})
    return {"lost": missing + errors.total(), "doubled": sum(count - 1 for count in ids.values())}


def emit(name: str, value: float, unit: str, ceiling: float | None = None, **notes: Any) -> None:
    figures.emit(f"batch.{name}", round(value, 2), unit, ceiling=ceiling, **notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("kills", "alone"))
    parser.add_argument("--requests", type=int, default=20_000, help="of the job that is killed")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000], help="of the jobs alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tessera-batch-") as name:
        folder = Path(name)
        fine = True
        if "kills" in options.parts:
            rows, out, total = write_rows(folder, options.requests), folder / "kills.jsonl", options.requests
            with serve(Setup(restart=True)) as server:
                done = kills(server, rows, out, total)
                found = judged(out, total)
                resumed = first_new(server.grpc[0], rows, out, total)
            each = [kill._asdict() for kill in done]
            emit("kills", len(done), "kills", rows=total, each=each, concurrency=CONCURRENCY)
            for what in ORDER:
                lost = max(kill.seconds_lost for kill in done if kill.what == what)
                emit(f"{what}_kill_s", lost, "s", rows=total)
            for what, count in found.items():
                emit(what, count, "rows", 0, rows=total)
                fine &= count == 0
            emit("resume_s", resumed, "s", 10, rows=total)
        if "alone" in options.parts:
            with standin() as url:
                for total in options.rows:
                    rows, out = write_rows(folder, total), folder / f"{total}.out.jsonl"
                    job = Job(url, rows, out, 64)
                    job.wait_for(1)
                    begun = time.monotonic()
                    memory, processor = job.end()
                    rate = total / (time.monotonic() - begun)
                    emit(f"alone.{total}.rows_s", rate, "rows/s", cpu_s=round(processor, 1), load=os.getloadavg()[0])
                    emit(f"alone.{total}.memory_mb", memory / 1e6, "MB", 300)
                    fine &= memory <= 300e6 and not any(judged(out, total).values())
                    emit(f"alone.{total}.resume_s", first_new(url, rows, out, total), "s", 10)
    return 0 if fine else 1
