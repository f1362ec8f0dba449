"""A stand-in for tritonserver that answers each question at once, for what a client alone can do: :func:`standin`.

In a process of its own, over the same gRPC; its answers are always ``yes``. Tests have it in theirs, and other answers.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc


@contextmanager
def standin() -> Iterator[str]:
    """Its address; it ends with the context."""
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        peer = context.peer()
        for request in requests:
            inputs = zip(request.inputs, request.raw_input_contents)
            question = next((raw[4:].decode() for tensor, raw in inputs if tensor.name == "text_input"), "")
            try:
                response = answered(self.answer(question, request.id, peer))
            except Exception as error:
                response = pb.ModelStreamInferResponse(error_message=str(error))
            response.infer_response.id = request.id
            response.infer_response.parameters["triton_final_response"].bool_param = True
            yield response


def answered(text: str) -> Any:
    """The whole answer, as one response of the stream."""
    response = pb.ModelStreamInferResponse()
    texts = {"text_output": text.encode(), "finish_reason": b"stop"}
    raw = {name: struct.pack("<I", len(value)) + value for name, value in texts.items()}
    raw["usage"] = struct.pack("<3i", 270, 1, 256)
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


if __name__ == "__main__":
    held, address = serve(Service())
    print(address, flush=True)
    sys.stdin.read()  # until the parent ends
