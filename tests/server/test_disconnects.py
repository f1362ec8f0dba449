"""Clients that go away without a word, by every door: where the server is told, what the engine holds for them is freed
at once, else by their deadlines. This is what docs/serving.md says of each model."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cv2
import http_door
import numpy as np
import pytest

from tessera_client import Client

pytestmark = [pytest.mark.server, pytest.mark.faults]

# Clients with some long answers under way, until they are killed.
SDK = """
import sys, time
from tessera_client import Client
client = Client(sys.argv[1])
streams = [client.stream(None, f"Describe {i}.", max_tokens=7000, ignore_eos=True) for i in range(3)]
print(*(next(stream).text for stream in streams), flush=True)
time.sleep(600)
"""
SDK_OVER_HTTP = SDK.replace("sys.argv[1]", "sys.argv[2]").replace("ignore_eos=True", "ignore_eos=True, timeout=6")

TRITONCLIENT = """
import queue, sys, time
import numpy as np
import tritonclient.grpc as grpcclient

def text(name, value):
    tensor = grpcclient.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], np.object_))
    return tensor

def inputs(i):
    return [text("text_input", f"Describe {i}."), text("sampling_parameters", SAMPLING)]

SAMPLING = '{"max_tokens": 7000, "ignore_eos": true}'
events = queue.Queue()
client = grpcclient.InferenceServerClient(sys.argv[1])
"""
STREAM = """
client.start_stream(lambda result, error: events.put((result, error)))
for i in range(3):
    client.async_stream_infer(MODEL, inputs(i))
for _ in range(3):
    result, error = events.get(timeout=60)
    assert error is None, error
print("under way", flush=True)
time.sleep(600)
"""
LEASED = """
client.start_stream(lambda result, error: events.put((result, error)))
client.async_stream_infer("language_model", [text("LEASE", "a1b2")])
for i in range(3):
    client.async_stream_infer("vlm", inputs(i), parameters={"tessera-lease": "a1b2"})
result, error = events.get(timeout=60)
assert error is None, error
print("under way", flush=True)
time.sleep(600)
"""
UNARY = """
for i in range(3):
    client.async_infer("vlm_unary", inputs(i), lambda result, error: print(error, flush=True))
print("sent", flush=True)
time.sleep(600)
"""


VLM, VLM_STREAM = (TRITONCLIENT + STREAM.replace("MODEL", f'"{model}"') for model in ("vlm", "vlm_stream"))
TOLD = (SDK, TRITONCLIENT + LEASED, VLM_STREAM, TRITONCLIENT + UNARY)
NOT_TOLD = tuple(
    program.replace("SAMPLING = '{", 'SAMPLING = \'{"timeout_us": 6000000, ') for program in (VLM, SDK_OVER_HTTP)
)


def running(server) -> float:
    return http_door.total(http_door.read(server.metrics_url), "tessera_requests_in_flight")


def ended(server, reason: str) -> float:
    return http_door.read(server.metrics_url).get(f'tessera_requests_total{{reason="{reason}"}}', 0)


def arrived(server) -> float:
    page = http_door.read(server.metrics_url)
    return sum(http_door.total(page, f"tessera_requests_{which}") for which in ("in_flight", "total"))


def wait_for(count: Callable[[Any], float], server, wanted: float, seconds: float) -> None:
    """Until there are that many requests; fails after `seconds`."""
    started = time.monotonic()
    while (found := count(server)) != wanted:
        assert time.monotonic() - started < seconds, f"{found} requests {count.__name__}, not {wanted}"
        time.sleep(0.02)


@contextmanager
def clients(server, *programs: str) -> Iterator[list[subprocess.Popen]]:
    """Of three requests each, all at the language model; killed at the end if not before."""
    time.sleep(0.5)  # the page is renewed four times a second
    wait_for(running, server, 0, 60)
    before = arrived(server)
    started = [
        subprocess.Popen([sys.executable, "-c", program, server.grpc_url, server.http_url], stdout=subprocess.PIPE)
        for program in programs
    ]
    try:
        assert all(client.stdout.readline().strip() for client in started), "one ended by itself"
        wait_for(arrived, server, before + 3 * len(programs), 30)
        yield started
    finally:
        for client in started:
            client.kill()
            client.communicate()


def hang_up(server, path: str, **sampling: int) -> None:
    """Sends a long request over HTTP and closes the connection once it is at the language model."""
    before = arrived(server)
    host, port = server.http_url.removeprefix("http://").split(":")
    parameters = json.dumps({"max_tokens": 7000, "ignore_eos": True, **sampling})
    body = json.dumps({"text_input": "Describe.", "sampling_parameters": parameters})
    head = f"POST /v2/models/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall((head + body).encode())
        wait_for(arrived, server, before + 1, 30)


def test_what_the_server_is_told_of_ends_at_once_and_a_client_that_is_merely_stopped_keeps_its_work(server):
    cancelled = ended(server, "cancelled")
    with clients(server, SDK, *TOLD) as (stopped, *others):
        stopped.send_signal(signal.SIGSTOP)
        for client in others:
            client.kill()
        hang_up(server, "vlm_stream/generate_stream")
        wait_for(running, server, 3, 5)
        time.sleep(1)  # five times what it takes to notice a killed one
        assert running(server) == 3
        assert ended(server, "cancelled") == cancelled + 3 * len(TOLD) + 1
    wait_for(running, server, 0, 5)


def test_what_the_server_is_not_told_of_ends_by_its_deadline(server):
    deadlines = ended(server, "deadline")
    with clients(server, *NOT_TOLD):
        for path in ("vlm_unary/generate", "vlm/generate_stream"):
            hang_up(server, path, timeout_us=3_000_000)
    wait_for(running, server, 0, 30)
    assert ended(server, "deadline") == deadlines + 3 * len(NOT_TOLD) + 2


def crowd(count: int) -> list[bytes]:
    """Pictures of which each takes preprocess some time."""
    rng = np.random.default_rng(count)
    noise = (rng.integers(0, 255, (1000, 1000, 3), np.uint8) for _ in range(count))
    return [cv2.imencode(".jpg", pixels)[1].tobytes() for pixels in noise]


def waiting_at_preprocess(server) -> float:
    page = http_door.read(server.metrics_url)
    return page.get('nv_inference_pending_request_count{model="preprocess",version="1"}', 0)


def test_pictures_of_a_killed_client_do_not_hold_up_another(server, tmp_path):
    for number, picture in enumerate(crowd(32)):
        (tmp_path / f"{number}.jpg").write_bytes(picture)
    program = """
import asyncio, pathlib, sys
from tessera_client import AsyncClient
async def ask():
    async with AsyncClient(sys.argv[1]) as client:
        paths = pathlib.Path(sys.argv[2]).iterdir()
        await asyncio.gather(*(client.ask(path, "Describe.", max_tokens=7000, ignore_eos=True) for path in paths))
asyncio.run(ask())
"""
    wait_for(running, server, 0, 60)
    client = subprocess.Popen([sys.executable, "-c", program, server.grpc_url, tmp_path])
    try:
        while waiting_at_preprocess(server) < 12:
            time.sleep(0.01)
            assert client.poll() is None
    finally:
        client.kill()
        client.wait()
    with Client(server.grpc_url) as other:
        other.ask(crowd(1)[0], "Which?", max_tokens=2, timeout=60)  # its turn comes after theirs
    wait_for(running, server, 0, 5)
