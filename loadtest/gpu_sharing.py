"""What two processes lose that share one GPU, the vision stage and the language model (`make bench NAME=gpu_sharing`).

Stand-ins of both models (InternVL3-8B's sizes) do work like W1's: one tile, 316 prompt tokens and 3 decoded tokens per
picture, tiles in batches of 32, prompts in steps of 8,192 tokens, decode in steps of 64. Vision hands its tiles over
through a bounded queue, so the slower side sets the pace. Measured: both on two streams of one process, both on one
stream in turn, each in a process of its own, between which the GPU slices its time, and the same under an MPS daemon,
which lets both use it at once.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import figures
from processes import in_processes

from tessera.launcher.options import MPS_CONTROL

COMMAND = "make bench NAME=gpu_sharing"
TILES = 32  # in a vision batch
PICTURES = 26  # in a prefill step: 8,192 tokens at 316 (here 315) per prompt
STEP_TOKENS = 8192
DECODED = 3  # tokens per picture after the first
DECODE_BATCH = 64
CONTEXT = 320
ROOM = 64  # tiles that may wait between the two sides
SETTLE_S = 1.2
ALONE_S = 3.5
STEADY_S = 7.5
PATIENCE_S = 100.0
MPS_START_S = 5.0


class Semaphore(Protocol):
    """One of threads or of processes."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool: ...

    def release(self) -> None: ...


class HandOver:
    """Tiles from vision to the language model: those done, and the room for more."""

    def __init__(self, make_semaphore: Callable[[int], Semaphore]) -> None:
        self.done, self.room = make_semaphore(0), make_semaphore(ROOM)


def take(semaphore: Semaphore, count: int, until: float) -> bool:
    """Takes this many, one by one; False when the time (of time.monotonic) is over before that."""
    for _ in range(count):
        left = until - time.monotonic()
        if left <= 0 or not semaphore.acquire(timeout=left):
            return False
    return True


def give(semaphore: Semaphore, count: int) -> None:
    for _ in range(count):
        semaphore.release()


def vision_side(batch: Callable[[], None], queue: HandOver, until: float) -> list[float]:
    """Encodes batches of tiles while there is room for them; when each ended."""
    marks = []
    while take(queue.room, TILES, until):
        batch()
        give(queue.done, TILES)
        marks.append(time.monotonic())
    return marks


def language_side(step: Callable[[], None], queue: HandOver, until: float) -> list[float]:
    """Runs a step for every 26 tiles; when each ended."""
    marks = []
    while take(queue.done, PICTURES, until):
        step()
        give(queue.room, PICTURES)
        marks.append(time.monotonic())
    return marks


def repeated(work: Callable[[], None], until: float) -> list[float]:
    """Does the work over and over; when each time ended."""
    marks = []
    while time.monotonic() < until:
        work()
        marks.append(time.monotonic())
    return marks


def rate(marks: Sequence[float], pictures: int, settle: float = SETTLE_S) -> float:
    """Pictures a second, from the first mark after ``settle`` seconds to the last; each mark ended ``pictures``."""
    steady = [mark for mark in marks if mark >= marks[0] + settle]
    if len(steady) < 3:
        raise ValueError(f"only {len(steady)} of {len(marks)} units fell into the steady part")
    return pictures * (len(steady) - 1) / (steady[-1] - steady[0])


def decode_steps(prefill_step: int) -> int:
    """How many decode steps follow the prefill step of this number, so that decoding keeps pace."""
    due = [number * PICTURES * DECODED // DECODE_BATCH for number in (prefill_step, prefill_step + 1)]
    return due[1] - due[0]


def loss_pct(shared: float, best: float) -> float:
    """How much less ``shared`` is than ``best``, in percent."""
    return 100.0 * (1.0 - shared / best)


def vision_work() -> Callable[[], None]:
    """A vision batch on a stream of its own, awaited."""
    import torch
    from gpu_standins import Captured, Place, VisionTower

    graph = Captured(VisionTower(Place("cuda", torch.bfloat16), TILES).forward)
    return on_stream(graph.replay)


def language_work() -> Callable[[], None]:
    """A prefill step and the decode steps due after it, on a stream of their own, awaited."""
    import torch
    from gpu_standins import Captured, Decoder, DecoderSizes, Place

    decoder = Decoder(Place("cuda", torch.bfloat16), DecoderSizes())
    prefill = Captured(decoder.prefill(STEP_TOKENS, PICTURES))
    decode = Captured(decoder.decode(DECODE_BATCH, CONTEXT))
    number = 0

    def step() -> None:
        nonlocal number
        prefill.replay()
        for _ in range(decode_steps(number)):
            decode.replay()
        number += 1

    return on_stream(step)


def on_stream(work: Callable[[], None]) -> Callable[[], None]:
    """The work launched on a new stream, then awaited."""
    import torch

    stream = torch.cuda.Stream()

    def run() -> None:
        with torch.cuda.stream(stream):
            work()
        stream.synchronize()

    return run


def one_process() -> dict[str, float]:
    """Pictures a second of each side alone, of both on two streams, and of both in turn."""
    vision, language = vision_work(), language_work()
    found = {
        "vision_alone": rate(repeated(vision, time.monotonic() + ALONE_S), TILES),
        "language_alone": rate(repeated(language, time.monotonic() + ALONE_S), PICTURES),
    }
    queue = HandOver(threading.Semaphore)
    until = time.monotonic() + STEADY_S
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(vision_side, vision, queue, until)
        marks = language_side(language, queue, until)
        encoding.result()
    found["two_streams"] = rate(marks, PICTURES)
    tiles = 0

    def in_turn() -> None:
        nonlocal tiles
        while tiles < PICTURES:
            vision()
            tiles += TILES
        language()
        tiles -= PICTURES

    found["one_stream"] = rate(repeated(in_turn, time.monotonic() + STEADY_S), PICTURES)
    return found


def own_process(side: str, queue: HandOver, both_ready: Any) -> list[float]:
    """One side in this process, from when both are ready; when its units ended."""
    work = vision_work() if side == "vision" else language_work()
    work()
    both_ready.wait(PATIENCE_S)
    until = time.monotonic() + STEADY_S
    return vision_side(work, queue, until) if side == "vision" else language_side(work, queue, until)


def two_processes() -> float:
    """Pictures a second with each side in a process of its own."""
    context = multiprocessing.get_context("spawn")
    queue, both_ready = HandOver(context.Semaphore), context.Barrier(2)
    tasks = [(own_process, side, queue, both_ready) for side in ("vision", "language")]
    _, marks = in_processes(tasks, PATIENCE_S)
    return rate(marks, PICTURES)


@contextmanager
def mps_daemon(program: str) -> Iterator[None]:
    """Processes that are started meanwhile share the GPU by MPS."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        places = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), folder)
        os.environ.update(places)
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        daemon = subprocess.Popen([program, "-f"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + MPS_START_S
            while not Path(folder, "control").exists():
                if daemon.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the MPS daemon did not start")
                time.sleep(0.02)
            yield
        finally:
            with suppress(subprocess.SubprocessError):
                subprocess.run([program], input=b"quit\n", timeout=10)
            daemon.kill()
            daemon.wait()
            for name in places:
                del os.environ[name]


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print("gpu_sharing: needs a GPU, and this machine has none", file=sys.stderr)
        return 1
    (found,) = in_processes([(one_process,)], PATIENCE_S)
    found["two_processes"] = two_processes()
    if program := shutil.which(MPS_CONTROL):
        with mps_daemon(program):
            found["two_processes_mps"] = two_processes()
    # With the two sides' work just added up: what a GPU without idle time gives when neither overlaps the other.
    added = 1.0 / (1.0 / found["vision_alone"] + 1.0 / found["language_alone"])
    print(f"alone: vision {found['vision_alone']:.1f} tiles/s, language model {found['language_alone']:.1f} pictures/s")
    for name in [name for name in found if not name.endswith("alone")]:
        print(f"{name:17} {found[name]:7.2f} pictures/s ({found[name] / added:.1%} of both added up, {added:.2f})")
        figures.emit(f"gpu_sharing.{name}", round(found[name], 3), "pictures/s", COMMAND, ceiling=round(added, 3))
    best = max(found["two_streams"], found["one_stream"])
    loss = loss_pct(found["two_processes"], best)
    print(f"two processes lose {loss:.2f}% against the better of one process")
    figures.emit("gpu_sharing.loss_pct", round(loss, 3), "%", COMMAND, ceiling=0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
