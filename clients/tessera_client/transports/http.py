"""HTTP, on httpx: an event loop in a thread of its own carries all requests of a client.

A whole answer goes through ``vlm_unary``'s infer endpoint (raw bytes, true status codes), a stream through ``vlm``'s
generate_stream (JSON and server-sent events; this endpoint answers every fault with 400, so errors are told apart
by their words). Connections are kept alive and reused; breaking a request off closes its own.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import TimeoutError as TimedOut
from contextlib import suppress
from typing import Any

import httpx

from tessera_client import contract
from tessera_client.messages import Delta, Models, ModelStatus, Request, ServerStatus
from tessera_client.transports.base import CONTROL_SECONDS, Deliver
from tessera_wire import errors

LENGTH_HEADER = "Inference-Header-Content-Length"
# A connection unused for 2 s may have been closed by the server: not reused.
LIMITS = httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=2.0)

_CODES = {
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    413: "INVALID_ARGUMENT",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "UNAVAILABLE",
}


class HttpTransport:
    """One server at ``host:port``."""

    def __init__(self, address: str, models: Models, tls: bool = False) -> None:
        self._address = address
        self._models = models
        # No proxies of the environment (they would be asked for localhost too), no redirects; deadlines are above.
        self._client = httpx.AsyncClient(
            base_url=f"{'https' if tls else 'http'}://{address}", limits=LIMITS, timeout=None, trust_env=False
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tessera-http", daemon=True)
        self._thread.start()
        self._under_way: dict[asyncio.Task[Any], Deliver] = {}
        self._closed = False

    def send(self, request: Request, request_id: str, timeout: float | None, deliver: Deliver) -> Callable[[], None]:
        deltas = self._events(request, request_id) if request.stream else self._whole(request, request_id, timeout)
        return self._start(self._relay(deltas, deliver)).cancel

    def cancel(self, request_id: str) -> None:
        path = f"/v2/models/{self._models.language_model}/generate_stream"
        self._wait(self._ask("POST", path, {"CANCEL": request_id}))

    def status(self) -> ServerStatus:
        return self._wait(self._status())

    def close(self) -> None:
        """Breaks off what is under way."""
        if not self._closed:
            self._wait(self._shut())
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _start(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._closed:
            work.close()
            raise errors.TesseraClientError("this client is closed", "open a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The outcome of a short piece of work; raises DeadlineExceeded after CONTROL_SECONDS."""
        future = self._start(work)
        try:
            return future.result(CONTROL_SECONDS)
        except Exception as error:
            future.cancel()
            raise self._mapped(error) from error

    async def _relay(self, deltas: AsyncIterator[Delta], deliver: Deliver) -> None:
        task: Any = asyncio.current_task()
        self._under_way[task] = deliver
        error = None
        try:
            async for delta in deltas:
                deliver(delta)
        except Exception as foreign:
            error = self._mapped(foreign)
        finally:
            self._under_way.pop(task, None)
        deliver(error)

    async def _shut(self) -> None:
        for task, deliver in list(self._under_way.items()):
            task.cancel()
            deliver(errors.Cancelled("the client was closed"))
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._client.aclose()

    async def _events(self, request: Request, request_id: str) -> AsyncIterator[Delta]:
        """The deltas of a generate_stream response."""
        path = f"/v2/models/{self._models.vlm}/generate_stream"
        async with self._client.stream("POST", path, json=contract.request_json(request, request_id)) as response:
            if response.status_code != 200:
                # 400 stands for every fault here; any other status is true.
                raise _failure(response.status_code, await response.aread(), known=response.status_code != 400)
            async for line in _lines(response):
                if line.startswith(b"data:"):
                    event = _json(line[5:])
                    if "error" in event:
                        raise errors.from_server(str(event["error"]))
                    yield contract.delta_from_json(event)

    async def _whole(self, request: Request, request_id: str, timeout: float | None) -> AsyncIterator[Delta]:
        """The one delta of an infer response (JSON head, then the outputs' raw contents)."""
        body, headers = _infer_body(request, request_id, timeout)
        response = await self._client.post(f"/v2/models/{self._models.unary}/infer", content=body, headers=headers)
        data = response.content
        if response.status_code != 200:
            raise _failure(response.status_code, data)
        position = head_length = int(response.headers.get(LENGTH_HEADER, len(data)))
        outputs: list[tuple[str, bytes]] = []
        for output in _json(data[:head_length]).get("outputs", []):
            size = output.get("parameters", {}).get("binary_data_size", 0)
            outputs.append((output["name"], data[position : position + size]))
            position += size
        yield contract.delta_from_raw(outputs)

    async def _status(self) -> ServerStatus:
        ready = (await self._client.get("/v2/health/ready")).status_code == 200
        version = _json(await self._ask("GET", "/v2"))["version"]
        index = json.loads(await self._ask("POST", "/v2/repository/index"))
        fields = ("version", "state", "reason")
        models = tuple(ModelStatus(model["name"], *(model.get(name, "") for name in fields)) for model in index)
        return ServerStatus(ready, version, models)

    async def _ask(self, method: str, path: str, body: Any = None) -> bytes:
        response = await self._client.request(method, path, json=body)
        if response.status_code != 200:
            raise _failure(response.status_code, response.content)
        return response.content

    def _mapped(self, error: Exception) -> errors.TesseraClientError:
        if isinstance(error, errors.TesseraClientError):
            return error
        if isinstance(error, TimedOut):
            return errors.DeadlineExceeded("the time given ran out before the answer was complete")
        if isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol):
            return errors.connection_failed(self._address, str(error) or type(error).__name__)
        return errors.ProtocolError(
            f"what answers here is no tritonserver: {type(error).__name__}: {error}", "is the address its HTTP port?"
        )


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """A body's lines, ended by a line feed alone: httpx's own also end at the separators that a text may hold."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _infer_body(request: Request, request_id: str, timeout: float | None) -> tuple[bytes, dict[str, str]]:
    tensors = contract.request_tensors(request)
    parameters: dict[str, Any] = {"binary_data_output": True}
    if timeout is not None:
        parameters["timeout"] = max(1, int(timeout * 1e6))
    inputs = [
        {"name": t.name, "datatype": t.datatype, "shape": t.shape, "parameters": {"binary_data_size": len(t.data)}}
        for t in tensors
    ]
    head = json.dumps({"id": request_id, "parameters": parameters, "inputs": inputs}).encode()
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
