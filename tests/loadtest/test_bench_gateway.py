"""The gateway's benchmark asks what the SDK's asks, and reads the gateway's answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import bench_gateway
import pytest
from clients.fake_transport import TIMINGS
from gateway.gateway_doubles import gateway, listening
from workloads import WORKLOADS, Workload

from tessera_client import Delta, ServerError, Usage
from tessera_client.messages import chat_request


def deltas(workload: Workload) -> list[Any]:
    used = Usage(300, workload.tokens, 256)
    return [Delta("a"), Delta("b"), Delta("", "length", used, TIMINGS)]


@pytest.mark.parametrize("name", ["W1", "W2", "W4a"])
def test_a_request_is_the_workloads_and_its_answer_is_counted(name: str) -> None:
    workload = WORKLOADS[name]
    door = gateway(deltas(workload), deltas(replace(workload, tokens=3)))
    with (
        listening(door.app) as address,
        bench_gateway.HttpAsker([address.removeprefix("http://")], workload, 7).connection() as ask,
    ):
        reply = ask(b"jpeg")
        with pytest.raises(RuntimeError, match=f"asked for {workload.tokens} tokens"):
            ask(b"jpeg")
        door.fake.script.append([ServerError("it broke")])
        with pytest.raises(RuntimeError, match="the gateway answers 500"):
            ask(b"jpeg")
    assert (reply.tokens, reply.stages) == (workload.tokens, (1, 2, 3, 4, 5, 6))
    assert (reply.first is not None, reply.parts) == ((True, 2) if workload.streamed else (False, 1))
    request = door.fake.requests[0][0]
    sdk = chat_request([{"role": "user", "content": "q"}], **workload.sampling)
    assert (request.images, request.stream) == ((b"jpeg",), workload.streamed)
    assert request.sampling is not None and sdk.sampling is not None
    assert json.loads(request.sampling) == json.loads(sdk.sampling)
