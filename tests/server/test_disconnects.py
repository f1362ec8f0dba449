"""Clients that go away without a word, by every door: where the server is told, what the engine holds for them is freed
at once, else by their deadlines. This is what docs/serving.md says of each model."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time

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
SDK_OVER_HTTP = SDK.replace("sys.argv[1]", "sys.argv[2]").replace("ignore_eos=True", "ignore_eos=True, timeout=4")

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


def running(server) -> float:
    return http_door.total(http_door.read(server.metrics_url), "tessera_requests_in_flight")


def ended(server, reason: str) -> float:
    return http_door.read(server.metrics_url).get(f'tessera_requests_total{{reason="{reason}"}}', 0)


def wait_for(server, wanted: float, seconds: float) -> None:
    """Until that many requests are in flight; fails after `seconds`."""
    started = time.monotonic()
    while running(server) != wanted:
        assert time.monotonic() - started < seconds, f"{running(server)} requests in flight, not {wanted}"
        time.sleep(0.02)


def run_and_kill(server, program: str) -> None:
    """Kills a client of three requests (SIGKILL) once all are at the language model."""
    wait_for(server, 0, 60)
    client = subprocess.Popen(
        [sys.executable, "-c", program, server.grpc_url, server.http_url], stdout=subprocess.PIPE, text=True
    )
    try:
        assert client.stdout.readline().strip(), "it ended by itself"
        wait_for(server, 3, 30)
    finally:
        client.kill()
        client.wait()


VLM_STREAM = TRITONCLIENT + STREAM.replace("MODEL", '"vlm_stream"')


@pytest.mark.parametrize(
    "program",
    [SDK, TRITONCLIENT + LEASED, VLM_STREAM, TRITONCLIENT + UNARY],
    ids=["vlm by the SDK", "vlm with a lease", "vlm_stream", "vlm_unary"],
)
def test_a_killed_grpc_client_takes_its_work_along(server, program):
    cancelled = ended(server, "cancelled")
    run_and_kill(server, program)
    wait_for(server, 0, 5)
    assert ended(server, "cancelled") == cancelled + 3


@pytest.mark.parametrize(
    "program",
    [TRITONCLIENT + STREAM.replace("MODEL", '"vlm"'), SDK_OVER_HTTP],
    ids=["vlm without a lease", "vlm by the SDK over HTTP"],
)
def test_what_the_server_is_not_told_of_ends_by_its_deadline(server, program):
    deadlines = ended(server, "deadline")
    run_and_kill(server, program.replace("SAMPLING = '{", 'SAMPLING = \'{"timeout_us": 4000000, '))
    wait_for(server, 0, 30)
    assert ended(server, "deadline") == deadlines + 3


def hang_up(server, path: str, **sampling: int) -> None:
    """Sends a long request over HTTP and closes the connection once it is at the language model."""
    wait_for(server, 0, 60)
    host, port = server.http_url.removeprefix("http://").split(":")
    parameters = json.dumps({"max_tokens": 7000, "ignore_eos": True, **sampling})
    body = json.dumps({"text_input": "Describe.", "sampling_parameters": parameters})
    head = f"POST /v2/models/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall((head + body).encode())
        wait_for(server, 1, 30)


def test_an_http_client_that_hangs_up_on_vlm_stream_takes_its_work_along(server):
    hang_up(server, "vlm_stream/generate_stream")
    wait_for(server, 0, 5)


@pytest.mark.parametrize("path", ["vlm_unary/generate", "vlm/generate_stream"])
def test_an_http_client_that_hangs_up_elsewhere_leaves_it_to_the_deadline(server, path):
    deadlines = ended(server, "deadline")
    hang_up(server, path, timeout_us=3_000_000)
    wait_for(server, 0, 30)
    assert ended(server, "deadline") == deadlines + 1


def test_a_client_that_is_merely_stopped_keeps_its_work(server):
    wait_for(server, 0, 60)
    client = subprocess.Popen([sys.executable, "-c", SDK, server.grpc_url], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout.readline().strip()
        client.send_signal(signal.SIGSTOP)
        time.sleep(1)  # five times what it takes to notice a killed one
        assert running(server) == 3
    finally:
        client.kill()
        client.wait()
    wait_for(server, 0, 5)


def crowd(count: int) -> list[bytes]:
    """Pictures of which each takes preprocess some time."""
    rng = np.random.default_rng(count)
    noise = (rng.integers(0, 255, (1000, 1000, 3), np.uint8) for _ in range(count))
    return [cv2.imencode(".jpg", pixels)[1].tobytes() for pixels in noise]


def waiting_at_preprocess(server) -> float:
    page = http_door.read(server.metrics_url)
    return page.get('nv_inference_pending_request_count{model="preprocess",version="1"}', 0)


def test_pictures_of_a_killed_client_do_not_hold_up_another(server, tmp_path):
    (tmp_path / "pictures").mkdir()
    for number, picture in enumerate(crowd(48)):
        (tmp_path / "pictures" / f"{number}.jpg").write_bytes(picture)
    program = """
import asyncio, pathlib, sys
from tessera_client import AsyncClient
async def ask():
    async with AsyncClient(sys.argv[1]) as client:
        paths = pathlib.Path(sys.argv[2]).iterdir()
        await asyncio.gather(*(client.ask(path, "Describe.", max_tokens=7000, ignore_eos=True) for path in paths))
asyncio.run(ask())
"""
    wait_for(server, 0, 60)
    client = subprocess.Popen([sys.executable, "-c", program, server.grpc_url, tmp_path / "pictures"])
    try:
        while waiting_at_preprocess(server) < 20:
            time.sleep(0.01)
            assert client.poll() is None
    finally:
        client.kill()
        client.wait()
    with Client(server.grpc_url) as other:
        other.ask(crowd(1)[0], "Which?", max_tokens=2, timeout=60)  # its turn comes after theirs
    wait_for(server, 0, 5)
