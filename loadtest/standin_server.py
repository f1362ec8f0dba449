"""Stand-ins for servers that answer each question at once, for what a client alone can do: :func:`standin`.

In a process of its own: one for tritonserver, over the same gRPC, and one of OpenAI's API, over HTTP. Their answers are
always ``yes``, as often as tokens are asked for where the end is to be ignored. Tests have them in their own process,
and other answers.
"""

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread
from typing import Any

import grpc
import uvicorn
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc


@contextmanager
def standin(kind: str = "tessera") -> Iterator[str]:
    """Its address; it ends with the context."""
    with subprocess.Popen(
        [sys.executable, __file__, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


class Service(service_pb2_grpc.GRPCInferenceServiceServicer):
    def answer(self, question: str, request_id: str, peer: str) -> str:
        """To override. What it raises is the answer's error."""
        return "yes"

    def ServerReady(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=True)

    def ServerMetadata(self, request: Any, context: Any) -> Any:
        return pb.ServerMetadataResponse(name="stand-in", version="0")

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        return pb.RepositoryIndexResponse(
            models=[pb.RepositoryIndexResponse.ModelIndex(name="vlm", version="1", state="READY")]
        )

    def ModelInfer(self, request: Any, context: Any) -> Any:
        """Which model this is."""
        assert request.model_name == "preprocess"
        response = pb.ModelInferResponse(id=request.id)
        about = json.dumps({"checkpoint": "0" * 32, "model_type": "stand-in"}).encode()
        response.outputs.add(name="SERVED", datatype="BYTES", shape=[1])
        response.raw_output_contents.append(struct.pack("<I", len(about)) + about)
        return response

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        peer = context.peer()
        for request in requests:
            if request.model_name == "language_model":  # a lease: a server that knows none refuses it
                refusal = pb.ModelStreamInferResponse(error_message="no leases here")
                refusal.infer_response.id = request.id
                yield refusal
                continue
            told = {tensor.name: raw for tensor, raw in zip(request.inputs, request.raw_input_contents)}
            tokens = asked_tokens(json.loads(told.get("sampling_parameters", b"")[4:] or b"{}"))
            try:
                answer = self.answer(told.get("text_input", b"")[4:].decode(), request.id, peer)
                responses = [part(answer) for _ in range(tokens - 1) if told.get("stream") == b"\1"]
                responses.append(part(answer, tokens))
            except Exception as error:
                responses = [pb.ModelStreamInferResponse(error_message=str(error))]
            for response in responses:
                response.infer_response.id = request.id
                response.infer_response.parameters["triton_final_response"].bool_param = response is responses[-1]
                yield response


def asked_tokens(sampling: dict[str, Any]) -> int:
    """How long the answer is."""
    return sampling["max_tokens"] if sampling.get("ignore_eos") else 1


def part(text: str, tokens: int | None = None) -> Any:
    """One response of the stream; ``tokens``: of the answer whose last it is."""
    response = pb.ModelStreamInferResponse()
    texts = {"text_output": text.encode(), "finish_reason": b"" if tokens is None else b"stop"}
    raw = {name: struct.pack("<I", len(value)) + value for name, value in texts.items()}
    if tokens is not None:
        raw |= {"usage": struct.pack("<3i", 270, tokens, 256), "timings": bytes(6 * 4)}
    for name, contents in raw.items():
        response.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
        response.infer_response.raw_output_contents.append(contents)
    return response


def serve(service: Service) -> tuple[Any, str]:
    """(gRPC's server, which has started; its address)."""
    server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


async def openai_app(scope: Any, receive: Any, send: Any) -> None:
    """Chat completions of OpenAI's API, as an ASGI application."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    asked = json.loads(body or b"{}")
    tokens = asked_tokens(asked)
    usage = {"prompt_tokens": 270, "completion_tokens": tokens}
    kind = b"text/event-stream" if asked.get("stream") else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    if asked.get("stream"):
        event = b"data: " + json.dumps({"choices": [{"delta": {"content": "yes"}}]}).encode() + b"\n\n"
        for _ in range(tokens):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        answer = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
    elif scope["path"] == "/v1/models":
        answer = json.dumps({"data": [{"id": "stand-in"}]}).encode()
    else:
        answer = json.dumps({"choices": [{"message": {"content": "yes" * tokens}}], "usage": usage}).encode()
    await send({"type": "http.response.body", "body": answer})


def main(kind: str, port: str = "0") -> None:
    """Says its address, and serves until the parent ends; OpenAI's API at this port, or any."""
    if kind == "tessera":
        held, address = serve(Service())
        print(address, flush=True)
        sys.stdin.read()
        held.stop(None)
        return
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=1024)
    server = uvicorn.Server(uvicorn.Config(openai_app, log_level="critical", lifespan="off"))
    Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server.run([listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
