"""HTTP, on httpx: each request has a thread while it is under way.

A whole answer goes through ``vlm_unary``'s infer endpoint (raw bytes, true status codes), a stream through ``vlm``'s
generate_stream (JSON and server-sent events; this endpoint answers every fault with 400, so errors are told apart
by their words). Connections are kept alive and reused. A thread that waits cannot be woken:
of a request that is broken off the server is told, and the thread closes its connection when the answer goes on.
"""

import json
import threading
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

import httpx

from tessera_client import contract
from tessera_client.messages import Delta, Models, ModelStatus, PicturePlan, Request, ServedModel, ServerStatus
from tessera_client.retry import ON_THE_WAY_S
from tessera_client.transports import CONTROL_SECONDS, SERVED_SECONDS, Deliver, Sent
from tessera_wire import errors
from tessera_wire.tensors import Tensor

LENGTH_HEADER = "Inference-Header-Content-Length"
# A connection unused for 2 s may have been closed by the server: not reused.
# No limit to their number: a cancel must not wait for the requests that it is to end.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)

_CODES = {
    **dict.fromkeys((400, 413), "INVALID_ARGUMENT"),
    **dict.fromkeys((405, 501), "UNIMPLEMENTED"),
    **dict.fromkeys((502, 503, 504), "UNAVAILABLE"),
    404: "NOT_FOUND",
}


class HttpTransport:
    """One server at ``host:port``."""

    def __init__(self, address: str, models: Models, tls: bool) -> None:
        self._address = address
        self._models = models
        # No proxies of the environment (they would be asked for localhost too), no redirects; deadlines are above.
        self._client = httpx.Client(
            base_url=f"{'https' if tls else 'http'}://{address}",
            limits=LIMITS,
            timeout=CONTROL_SECONDS,
            trust_env=False,
        )
        self._listeners: dict[str, Deliver] = {}
        self._closed = False

    def send(self, request: Request, request_id: str, timeout: float | None, deliver: Deliver) -> Sent:
        self._listeners[request_id] = deliver
        if self._closed:
            raise self._mapped(RuntimeError("closed"))
        deltas = (self._events if request.stream else self._whole)(request, request_id, timeout)
        threading.Thread(target=self._relay, args=(request_id, deltas), name="tessera-http", daemon=True).start()
        return Sent(partial(self._listeners.pop, request_id, None), partial(self._cancel, request_id))

    def plan(self, request: Request, timeout: float | None) -> tuple[PicturePlan, ...]:
        return contract.plans_from_raw(self._preprocessed("CUT", contract.question_tensors(request), timeout))

    def served(self) -> ServedModel:
        return contract.served_from_raw(self._preprocessed("SERVED", contract.served_tensors(), SERVED_SECONDS))

    def _preprocessed(self, output: str, tensors: Sequence[Tensor], timeout: float | None) -> list[tuple[str, bytes]]:
        """An output that `preprocess` is asked for by its name."""
        body, headers = _infer_body(tensors, uuid.uuid4().hex, timeout, (output,))
        try:
            return self._infer(self._models.preprocess, body, headers, timeout)
        except Exception as error:
            raise self._mapped(error) from error

    def status(self) -> ServerStatus:
        try:
            ready = self._client.get("/v2/health/ready").status_code == 200
            version = _json(self._ask("GET", "/v2"))["version"]
            index = json.loads(self._ask("POST", "/v2/repository/index"))
            fields = ("version", "state", "reason")
            models = tuple(ModelStatus(model["name"], *(model.get(name, "") for name in fields)) for model in index)
            return ServerStatus(ready, version, models)
        except Exception as error:
            raise self._mapped(error) from error

    def close(self) -> None:
        """Breaks off what is under way, here and on the server."""
        self._closed = True
        under_way = list(self._listeners)
        for request_id in under_way:
            self._deliver_last(request_id, errors.Cancelled("the client was closed"))
        with suppress(errors.TesseraClientError):  # a server that does not listen is not asked again
            for request_id in under_way:
                self._cancel(request_id)
        self._client.close()

    def _relay(self, request_id: str, deltas: Generator[Delta, None, None]) -> None:
        """The life of a request's thread. Without a listener it ends with the next delta."""
        error = None
        try:
            with closing(deltas):
                for delta in deltas:
                    if (deliver := self._listeners.get(request_id)) is None:
                        return
                    deliver(delta)
        except Exception as foreign:
            error = self._mapped(foreign)
        self._deliver_last(request_id, error)

    def _deliver_last(self, request_id: str, error: errors.TesseraClientError | None) -> None:
        if deliver := self._listeners.pop(request_id, None):
            deliver(error)

    def _cancel(self, request_id: str) -> None:
        try:
            self._ask("POST", f"/v2/models/{self._models.language_model}/generate_stream", {"CANCEL": request_id})
        except Exception as error:
            raise self._mapped(error) from error

    def _events(self, request: Request, request_id: str, timeout: float | None) -> Generator[Delta, None, None]:
        """The deltas of a generate_stream response."""
        path = f"/v2/models/{self._models.vlm}/generate_stream"
        body = contract.request_json(request, request_id, timeout)
        with self._client.stream("POST", path, json=body, timeout=_patience(timeout)) as response:
            if response.status_code != 200:
                # 400 stands for every fault here; any other status is true.
                raise _failure(response.status_code, response.read(), known=response.status_code != 400)
            for line in _lines(response):
                if line.startswith(b"data:"):
                    event = _json(line[5:])
                    if "error" in event:
                        raise errors.from_server(str(event["error"]))
                    yield contract.delta_from_json(event)

    def _whole(self, request: Request, request_id: str, timeout: float | None) -> Generator[Delta, None, None]:
        """The one delta of an infer response."""
        body, headers = _infer_body(contract.request_tensors(request), request_id, timeout)
        yield contract.delta_from_raw(self._infer(self._models.unary, body, headers, _patience(timeout)))

    def _infer(
        self, model: str, body: bytes, headers: dict[str, str], timeout: float | None
    ) -> list[tuple[str, bytes]]:
        """The outputs of an infer response (JSON head, then the outputs' raw contents): name, contents."""
        path = f"/v2/models/{model}/infer"
        response = self._client.post(path, content=body, headers=headers, timeout=timeout)
        data = response.content
        if response.status_code != 200:
            raise _failure(response.status_code, data)
        position = head_length = int(response.headers.get(LENGTH_HEADER, len(data)))
        outputs: list[tuple[str, bytes]] = []
        for output in _json(data[:head_length]).get("outputs", []):
            size = output.get("parameters", {}).get("binary_data_size", 0)
            outputs.append((output["name"], data[position : position + size]))
            position += size
        return outputs

    def _ask(self, method: str, path: str, body: Any = None) -> bytes:
        response = self._client.request(method, path, json=body)
        if response.status_code != 200:
            raise _failure(response.status_code, response.content)
        return response.content

    def _mapped(self, error: Exception) -> errors.TesseraClientError:
        if isinstance(error, errors.TesseraClientError):
            return error
        if self._closed:
            return errors.TesseraClientError("this client is closed", "open a new one")
        if isinstance(error, httpx.TimeoutException):
            return errors.DeadlineExceeded("the time given ran out before the answer was complete")
        if isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol):
            return errors.connection_failed(self._address, str(error) or type(error).__name__)
        return errors.ProtocolError(
            f"what answers here is no tritonserver: {type(error).__name__}: {error}", "is the address its HTTP port?"
        )


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """A body's lines, ended by a line feed alone: httpx's own also end at the separators that a text may hold."""
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _patience(timeout: float | None) -> float | None:
    """Seconds to wait for a server that was told to take ``timeout``."""
    return None if timeout is None else timeout + ON_THE_WAY_S


def _infer_body(
    tensors: Sequence[Tensor], request_id: str, timeout: float | None, outputs: Sequence[str] = ()
) -> tuple[bytes, dict[str, str]]:
    """An infer request and its headers; ``outputs``: those that are wanted, where not all are."""
    parameters: dict[str, Any] = {"binary_data_output": True}
    if timeout is not None:
        parameters["timeout"] = contract.microseconds(timeout)
    inputs = [
        {"name": t.name, "datatype": t.datatype, "shape": t.shape, "parameters": {"binary_data_size": len(t.data)}}
        for t in tensors
    ]
    fields: dict[str, Any] = {"id": request_id, "parameters": parameters, "inputs": inputs}
    if outputs:
        fields["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    head = json.dumps(fields).encode()
    headers = {"Content-Type": "application/octet-stream", LENGTH_HEADER: str(len(head))}
    return b"".join((head, *(tensor.data for tensor in tensors))), headers


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise errors.ProtocolError(f"the server sent no JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise errors.ProtocolError(f"the server sent no JSON object: {data[:80]!r}")
    return value


def _failure(status: int, data: bytes, known: bool = True) -> errors.TesseraClientError:
    """The error of a response; its body may be JSON, an event holding JSON, or plain text."""
    text = data.decode("utf-8", "replace").strip()
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        text = str(json.loads(text.removeprefix("data:"))["error"])
    return errors.from_server(text, _CODES.get(status, "INTERNAL") if known else "")
