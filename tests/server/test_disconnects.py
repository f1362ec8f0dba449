"""Clients that go away without a word free what the engine holds for them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest
import server_metrics

pytestmark = [pytest.mark.server, pytest.mark.faults]

# A client with a long answer under way; it says so after the first token and waits to be killed.
CLIENT = """
import queue, sys, time
import numpy as np
import tritonclient.grpc as grpcclient

def text(name, value):
    tensor = grpcclient.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], np.object_))
    return tensor

events = queue.Queue()
client = grpcclient.InferenceServerClient(sys.argv[1])
client.start_stream(lambda result, error: events.put((result, error)))
sampling = '{"max_tokens": 7000, "ignore_eos": true}'
client.async_stream_infer("vlm_stream", [text("text_input", "Describe."), text("sampling_parameters", sampling)])
result, error = events.get(timeout=60)
print("under way" if error is None else error, flush=True)
time.sleep(600)
"""


def running(server) -> float:
    return server_metrics.total(server_metrics.read(server.metrics_url), "tessera_requests_in_flight")


def wait_for(server, wanted: float, seconds: float) -> float:
    """Seconds until that many requests are in flight; fails after `seconds`."""
    started = time.monotonic()
    while running(server) != wanted:
        assert time.monotonic() - started < seconds, f"{running(server)} requests in flight, not {wanted}"
        time.sleep(0.02)
    return time.monotonic() - started


def test_a_grpc_client_killed_on_a_front_is_noticed_within_a_second(server):
    wait_for(server, 0, 30)
    client = subprocess.Popen([sys.executable, "-c", CLIENT, server.grpc_url], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout.readline().strip() == "under way"
        wait_for(server, 1, 5)
    finally:
        client.kill()
        client.wait()
    # The page itself is up to a quarter of a second old.
    wait_for(server, 0, 1.25)


def test_an_http_client_that_hangs_up_on_a_front_is_noticed_within_a_second(server):
    wait_for(server, 0, 30)
    host, port = server.http_url.removeprefix("http://").split(":")
    body = b'{"text_input": "Describe.", "sampling_parameters": "{\\"max_tokens\\": 7000, \\"ignore_eos\\": true}"}'
    head = f"POST /v2/models/vlm_stream/generate_stream HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        wait_for(server, 1, 5)
    wait_for(server, 0, 1.25)
