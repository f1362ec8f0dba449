"""A stand-in for tritonserver that answers each question at once, for what a client alone can do: :func:`standin`.

In a process of its own, over the same gRPC; its answers are always ``yes``.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


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


def main() -> None:
    import grpc
    from tritonclient.grpc import service_pb2 as pb
    from tritonclient.grpc import service_pb2_grpc

    last = pb.ModelStreamInferResponse()
    texts = {"text_output": b"yes", "finish_reason": b"stop"}
    raw = {name: struct.pack("<I", len(text)) + text for name, text in texts.items()}
    raw["usage"] = struct.pack("<3i", 270, 1, 256)
    for name, contents in raw.items():
        last.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
        last.infer_response.raw_output_contents.append(contents)
    last.infer_response.parameters["triton_final_response"].bool_param = True

    class Service(service_pb2_grpc.GRPCInferenceServiceServicer):
        def ServerReady(self, request: Any, context: Any) -> Any:
            return pb.ServerReadyResponse(ready=True)

        def ServerMetadata(self, request: Any, context: Any) -> Any:
            return pb.ServerMetadataResponse(name="stand-in", version="0")

        def RepositoryIndex(self, request: Any, context: Any) -> Any:
            return pb.RepositoryIndexResponse(
                models=[pb.RepositoryIndexResponse.ModelIndex(name="vlm", version="1", state="READY")]
            )

        def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
            for request in requests:
                last.infer_response.id = request.id
                yield last

    server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    sys.stdin.read()  # until the parent ends


if __name__ == "__main__":
    main()
