"""`make soak`: half an hour of mixed load on the CPU ensemble. Does memory stay flat, is every request answered?

Starts a server through the launcher and keeps a few requests under way: short and long answers, one, two and no
pictures, streams that are left early, clients that vanish without a word, requests that must be refused; over gRPC,
HTTP, the fronts and a gateway. All pictures are distinct. Meanwhile it looks at every process of the server and of the
gateway and at the shared memory. The first third is warm-up (caches fill); after it, the mean of the last quarter may
exceed that of the first by 5% at most. And each request the language model took in must have ended exactly once, by its
own count and by ours.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import figures
import httpx
import openai
import psutil
from measuring import counted
from serving import gateway
from workloads import picture

from tessera.launcher.guard import descendants
from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server
from tessera_client import Client, InvalidRequest, Models, Retry

ALLOWED_PCT = 5.0
ALLOWED_DESCRIPTORS = 16
TIMEOUT_S = 120.0
DRAIN_S = 60.0
QUESTION = "Is there an exposed wire?"
TASK = "Describe the room."
SHARED_MEMORY = Path("/dev/shm")
GATEWAY_WORKERS = 2

# How often each kind of request comes, out of 100.
MIX = {
    "short": 28,
    "long": 8,
    "text": 8,
    "two pictures": 5,
    "cancelled": 8,
    "vanished": 3,
    "malformed": 11,
    "gateway": 14,
    "gateway stream": 6,
    "gateway left": 4,
    "gateway refused": 5,
}
LEFT, REFUSED = ("cancelled", "vanished", "gateway left"), ("malformed", "gateway refused")
ENDS = dict.fromkeys(MIX, "answered") | dict.fromkeys(LEFT, "left") | dict.fromkeys(REFUSED, "refused")
"""How each kind of request must end."""


class Door:
    """A gateway's address and processes, and what is asked of it by OpenAI's client."""

    def __init__(self, address: str, pid: int) -> None:
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0)
        self._create: Callable[..., Any] = client.chat.completions.create
        names = ["gateway", *(f"gateway's {number}" for number in range(1, 9))]  # its workers, and what counts for them
        self.processes = dict(zip([pid, *sorted(descendants(pid))], names))

    def ask(self, image: bytes, text: str, **options: Any) -> Any:
        """The answer, or the stream of its parts."""
        url = {"url": f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"}
        content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]
        return self._create(**{"model": "vlm", "messages": [{"role": "user", "content": content}], **options})

    def _stream(self, image: bytes, text: str, max_tokens: int) -> Any:
        return self.ask(image, text, max_tokens=max_tokens, extra_body={"ignore_eos": True}, stream=True)

    def streamed(self, image: bytes, text: str, length: int) -> str:
        """The finish reason of a stream of that many tokens."""
        *_, reason = (choice.finish_reason for part in self._stream(image, text, length) for choice in part.choices)
        return str(reason)

    def left(self, image: bytes, text: str) -> None:
        """Goes away after the first words of a long answer."""
        with self._stream(image, text, 2000) as parts:
            if not any(choice.delta.content for part in parts for choice in part.choices):
                raise AssertionError("the stream had no words")

    def refused(self, image: bytes, text: str, dice: random.Random) -> None:
        """Sends what must be refused, and by which status."""
        attempts: list[tuple[int, bytes, dict[str, Any]]] = [
            (400, image[: len(image) // 2], {}),
            (400, image, {"extra_body": {"beams": 4}}),
            (404, image, {"model": "another"}),
            (431, image, {"extra_headers": {"X-Long": "x" * 20_000}}),
            (413, b"", {"extra_body": {"messages": [0] * 200_000}}),
        ]
        status, sent, options = dice.choice(attempts)
        try:
            self.ask(sent, text, **options)
        except openai.APIStatusError as refusal:
            if refusal.status_code == status:
                return
            raise
        raise AssertionError(f"what should be refused by {status} was answered")


class Traffic:
    """The mixed load: some threads, each with one request under way; counts how every one of them ended."""

    def __init__(self, server: Server, door: Door, seed: int) -> None:
        self._door = door
        patience = {"timeout": TIMEOUT_S, "retry": Retry(attempts=1)}
        self._clients = [
            Client(server.grpc_url, **patience),
            Client(server.grpc_url, models=Models(vlm="vlm_stream"), **patience),
            Client(server.http_url, **patience),
        ]
        self._http_url, self._seed = server.http_url, seed
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.sent: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        """Ways in which requests ended: answered, left, refused, and failed, which should not have happened."""
        self.faults: Counter[str] = Counter()

    @property
    def accepted(self) -> int:
        """Requests of which the language model gave at least one token."""
        return self.ended["answered"] + self.ended["left"]

    @property
    def requests(self) -> int:
        return self.sent.total()

    @property
    def unanswered(self) -> int:
        """Requests that had no end, or not the one they should have had."""
        with self._lock:
            return self.requests - self.accepted - self.ended["refused"]

    def start(self, threads: int) -> None:
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"soak-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Lets the requests under way end; one that does not within its time stays unanswered."""
        self._stop.set()
        deadline = time.monotonic() + TIMEOUT_S + 10
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for client in self._clients:
            client.close()

    def _run(self, number: int) -> None:
        dice = random.Random(f"{self._seed} {number}")
        while not self._stop.is_set():
            (kind,) = dice.choices(list(MIX), weights=list(MIX.values()))
            with self._lock:
                self.sent[kind] += 1
            try:
                reason = getattr(self, f"_{kind.replace(' ', '_')}")(dice, dice.choice(self._clients))
                if ENDS[kind] == "answered" and reason not in ("stop", "length"):
                    raise AssertionError(f"ended with finish_reason {reason!r}")
                end, fault = ENDS[kind], None
            except Exception as error:
                end, fault = "failed", f"{kind}: {type(error).__name__}: {error}"
            with self._lock:
                self.ended[end] += 1
                if fault:
                    self.faults[fault] += 1
            if fault:  # a server that is gone must not be asked a million times
                time.sleep(0.2)

    # Each kind asks once: what is to be answered gives its finish reason, and what must end otherwise raises unless it
    # did.

    def _picture(self, dice: random.Random) -> bytes:
        return picture(dice.randrange(64, 640), dice.randrange(64, 640), (self._seed, dice.getrandbits(63)))

    def _short(self, dice: random.Random, client: Client) -> str:
        return client.ask(self._picture(dice), QUESTION, max_tokens=4, max_tiles=dice.randint(1, 4)).finish_reason

    def _long(self, dice: random.Random, client: Client) -> str:
        length = dice.randrange(80, 200)
        with client.stream(self._picture(dice), TASK, max_tokens=length, ignore_eos=True, max_tiles=1) as stream:
            answer = stream.answer()
        if answer.usage is None or answer.usage.completion_tokens != length:
            raise AssertionError(f"asked for {length} tokens, got {answer.usage}")
        return answer.finish_reason

    def _text(self, dice: random.Random, client: Client) -> str:
        return client.ask(None, f"{TASK} {dice.random()}", max_tokens=16, temperature=1.0).finish_reason

    def _two_pictures(self, dice: random.Random, client: Client) -> str:
        pictures = [self._picture(dice), self._picture(dice)]
        return client.ask(pictures, QUESTION, max_tokens=4, max_tiles=2).finish_reason

    def _cancelled(self, dice: random.Random, client: Client) -> None:
        """Leaves after some tokens; the client tells the server."""
        with client.stream(self._picture(dice), TASK, max_tokens=2000, ignore_eos=True, max_tiles=1) as stream:
            for _ in range(dice.randrange(1, 6)):
                next(stream)

    def _vanished(self, dice: random.Random, client: Client) -> None:
        """Breaks the connection off after the first token; the front has to notice by itself."""
        sampling = json.dumps({"max_tokens": 2000, "ignore_eos": True})
        body = {"text_input": f"{TASK} {dice.random()}", "sampling_parameters": sampling}
        url = f"{self._http_url}/v2/models/vlm_stream/generate_stream"
        with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as response:
            line = next(response.iter_lines(), "")
            if response.status_code != 200 or '"error"' in line:
                raise AssertionError(f"HTTP {response.status_code}: {line[:200]!r}")

    def _gateway(self, dice: random.Random, _: Client) -> str:
        return str(self._door.ask(self._picture(dice), QUESTION, max_tokens=4).choices[0].finish_reason)

    def _gateway_stream(self, dice: random.Random, _: Client) -> str:
        return self._door.streamed(self._picture(dice), TASK, dice.randrange(80, 200))

    def _gateway_left(self, dice: random.Random, _: Client) -> None:
        self._door.left(self._picture(dice), TASK)

    def _gateway_refused(self, dice: random.Random, _: Client) -> None:
        self._door.refused(self._picture(dice), QUESTION, dice)

    def _malformed(self, dice: random.Random, client: Client) -> None:
        image = self._picture(dice)
        url = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.jpg"}}
        attempts: list[Callable[[], object]] = [
            lambda: client.ask(image[: len(image) // 2], QUESTION),
            lambda: client.ask(dice.randbytes(500), QUESTION),
            lambda: client.ask(image, "<image> or <image>?"),
            lambda: client.ask(image, QUESTION, temperature=-1),
            lambda: client.ask(image, QUESTION, beams=4),
            lambda: client.ask(None, "word " * 20_000),
            lambda: client.ask([image] * 9, QUESTION),
            lambda: client.chat([{"role": "user", "content": [url, {"type": "text", "text": QUESTION}]}]),
        ]
        number = dice.randrange(len(attempts))
        try:
            attempts[number]()
        except InvalidRequest:
            return
        raise AssertionError(f"malformed request {number} was answered")


class Watch:
    """Looks at the server's processes and shared memory every ``interval`` seconds, on a thread of its own."""

    def __init__(self, server: Server, door: Door, interval: float) -> None:
        self._server = server
        self._interval = interval
        stubs = {pid: name for name, pid in server.stub_pids().items()}
        self._processes = {server.pid: "tritonserver", **stubs, **door.processes}
        names = self._processes.values()
        self.rss, self.pss, self.descriptors = ({name: list[float]() for name in names} for _ in range(3))
        """By process: bytes, bytes, open files."""
        self.shared: list[float] = []
        """Bytes of this server's files in /dev/shm."""
        self.lost = ""
        """Why the watch ended early: a process is gone."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        for pid, name in self._processes.items():
            process = psutil.Process(pid)
            memory = process.memory_full_info()
            self.rss[name].append(memory.rss)
            self.pss[name].append(memory.pss)
            self.descriptors[name].append(process.num_fds())
        files = SHARED_MEMORY.glob(f"{self._server.shm_prefix}*")
        self.shared.append(sum(file.stat().st_blocks * 512 for file in files))

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self.look()
            except (OSError, psutil.Error) as error:
                self.lost = self._server.failure() or f"a process could not be looked at: {error}"
                return


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last quarter of what follows the warm-up (the first third)."""
    settled = values[len(values) // 3 :]
    quarter = len(settled) // 4
    if quarter == 0:
        raise ValueError(f"{len(values)} samples are too few: make the run longer or --interval shorter")
    return fmean(settled[:quarter]), fmean(settled[-quarter:])


def growth_pct(values: Sequence[float]) -> float:
    """How much the last quarter exceeds the first, in percent; negative where it shrank."""
    first, last = ends(values)
    return 100.0 * (last - first) / first if first else 0.0


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The values as a line of bars between their least and their greatest."""
    bars = "▁▂▃▄▅▆▇█"
    width = min(width, len(values))
    means = [fmean(values[len(values) * i // width : len(values) * (i + 1) // width]) for i in range(width)]
    low, high = min(means), max(means)
    return "".join(bars[int((value - low) / (high - low) * (len(bars) - 1)) if high > low else 0] for value in means)


def drain(server: Server, accepted: int) -> tuple[int, int]:
    """(requests that ended in the language model, requests still in it), by the metrics page: when nothing is under way
    and all of ours have ended, or after a minute."""
    deadline = time.monotonic() + DRAIN_S
    while True:
        values = counted(server.metrics_url)
        books = int(values["tessera_requests_total"]), int(values["tessera_requests_in_flight"])
        if books == (accepted, 0) or time.monotonic() > deadline:
            return books
        time.sleep(1.0)


def row(name: str, values: Sequence[float], rest: str = "") -> str:
    """One line of the report; ``values`` in bytes."""
    first, last = ends(values)
    numbers = f"{first / 1e6:11.1f} MB{last / 1e6:9.1f} MB{growth_pct(values):+8.2f}%"
    return f"{name:18}{numbers}{rest:20}   {sparkline(values)}"


def report(watch: Watch) -> list[str]:
    """Prints what was seen; returns what was not flat."""
    faults = []
    print(f"{'':18}{'after warm-up':>14}{'at the end':>12}{'growth':>9}{'PSS':>9}{'files':>11}   MB over the run")
    for name, values in watch.rss.items():
        before, after = ends(watch.descriptors[name])
        print(row(name, values, f"{ends(watch.pss[name])[1] / 1e6:6.0f} MB{before:5.0f}>{after:<5.0f}"))
        if (growth := growth_pct(values)) > ALLOWED_PCT:
            faults.append(f"the memory of {name} grew by {growth:.2f}%")
        if after - before > ALLOWED_DESCRIPTORS:
            faults.append(f"the open files of {name} grew from {before:.0f} to {after:.0f}")
    print(row("shared memory", watch.shared))
    if (growth := growth_pct(watch.shared)) > ALLOWED_PCT:
        faults.append(f"shared memory grew by {growth:.2f}%")
    return faults


def soak(server: Server, traffic: Traffic, watch: Watch, seconds: float, concurrency: int) -> list[str]:
    """Runs the load for so long, then lets it drain. Returns what is wrong with the server and the books."""
    started = time.monotonic()
    traffic.start(concurrency)
    watch.start()
    next_word = 60.0
    while (elapsed := time.monotonic() - started) < seconds and not watch.lost:
        time.sleep(0.5)
        if elapsed > next_word:
            next_word += 60.0
            print(f"{elapsed / 60:.0f} min: ended {dict(traffic.ended)}", file=sys.stderr, flush=True)
    watch.stop()
    traffic.stop()
    faults = [watch.lost] if watch.lost else []
    try:
        ended, in_flight = drain(server, traffic.accepted)
        if (ended, in_flight) != (traffic.accepted, 0):
            books = f"the language model ended {ended} requests and holds {in_flight}"
            faults.append(f"{books}, but {traffic.accepted} were answered or left")
    except OSError as error:
        faults.append(f"the metrics page is gone: {error}")
    if (failure := server.failure()) and failure not in faults:
        faults.append(failure)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--interval", type=float, default=3.0, help="seconds between two looks at the processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, help="default: the default model")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="the server's environment, for short trials"
    )
    arguments = parser.parse_args()
    options = ServerOptions(
        figures.ROOT / "model_repository",
        checkpoint=arguments.checkpoint,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        environment=dict(entry.split("=", 1) for entry in arguments.set),
    )
    started = time.monotonic()
    with Server(options) as server, gateway([server.grpc_url], GATEWAY_WORKERS) as (address, pid):
        door = Door(address, pid)
        traffic, watch = Traffic(server, door, arguments.seed), Watch(server, door, arguments.interval)
        faults = soak(server, traffic, watch, 60 * arguments.minutes, arguments.concurrency)
    minutes = (time.monotonic() - started) / 60
    faults += report(watch)
    faults += [f"{count} x {fault}" for fault, count in traffic.faults.most_common(10)]
    if traffic.unanswered > sum(traffic.faults.values()):
        faults.append(f"{traffic.unanswered - sum(traffic.faults.values())} requests never ended")
    print(f"{traffic.requests} requests sent: {dict(traffic.sent)}; ended: {dict(traffic.ended)}")
    notes = {"concurrency": arguments.concurrency, "settings": arguments.set}
    growth = max(growth_pct(values) for values in watch.rss.values())
    for name, value, unit, bound in (
        ("minutes", round(minutes, 1), "min", None),
        ("requests", traffic.requests, "requests", None),
        ("unanswered", traffic.unanswered, "requests", 0),
        ("rss_growth_pct", round(growth, 2), "%", ALLOWED_PCT),
        ("shm_growth_pct", round(growth_pct(watch.shared), 2), "%", ALLOWED_PCT),
    ):
        command = f'make soak ARGS="--minutes {arguments.minutes:g}"'
        figures.emit(f"soak.{name}", value, unit, command, bound, **notes)
    for fault in faults:
        print(f"soak: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
