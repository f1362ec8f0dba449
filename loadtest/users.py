"""Locust's users: each keeps one request of a standard workload under way, over the client of this project.

Importing this needs locust (requirements-loadtest.txt), which makes the standard library cooperative; gRPC's C core
must be told so before its first channel.
"""

from __future__ import annotations

import secrets
import time

from grpc.experimental import gevent as grpc_gevent
from locust import User, constant, task
from workloads import WORKLOADS, Pictures, Workload

from tessera_client import Client, ProtocolError, Retry

grpc_gevent.init_gevent()


class WorkloadUser(User):
    """Asks one question after the other without a pause, so that users are requests in flight.

    All users of a process share one client, as the threads of a program would. Locust's table shows the whole
    answer under the workload's name and, where it is streamed, the first token under ``<name> first token``.
    """

    abstract = True
    wait_time = constant(0)
    scheme: str
    streams: bool | None = None
    """None goes by the workload: short answers are asked for whole."""

    workload: Workload = WORKLOADS["W1"]
    pictures: Pictures = Pictures(workload, seed=0)
    timeout: float = 600.0
    _clients: dict[str, Client] = {}  # noqa: RUF012 (shared on purpose)

    @task
    def ask(self) -> None:
        picture = self.pictures.deal()
        for prompt in self.workload.prompts:
            started = time.perf_counter()
            length, error = 0, None
            try:
                length = self._ask(picture, self.workload.question(prompt), started)
            except Exception as caught:
                error = caught
            self._report(self.workload.name, started, length, error)

    def _ask(self, picture: bytes, question: str, started: float) -> int:
        """Returns the answer's length in bytes of UTF-8."""
        workload, client = self.workload, self._client()
        if workload.streamed if self.streams is None else self.streams:
            with client.stream(picture, question, **workload.sampling) as stream:
                for number, _ in enumerate(stream):
                    if number == 0:
                        self._report(f"{workload.name} first token", started, 0, None)
                answer = stream.answer()
        else:
            answer = client.ask(picture, question, **workload.sampling)
        if answer.usage is None or answer.usage.completion_tokens != workload.tokens:
            raise ProtocolError(f"asked for {workload.tokens} tokens, got {answer.usage}")
        return len(answer.text.encode())

    def _client(self) -> Client:
        host = self.host or self.environment.host
        address = f"{self.scheme}://{host.rpartition('://')[2]}" if host else f"{self.scheme}://localhost"
        # No retries: a refused request is a failure in Locust's table, not a slow success.
        return self._clients.setdefault(address, Client(address, timeout=self.timeout, retry=Retry(attempts=1)))

    def _report(self, name: str, started: float, length: int, error: Exception | None) -> None:
        self.environment.events.request.fire(
            request_type=self.scheme,
            name=name,
            response_time=(time.perf_counter() - started) * 1e3,
            response_length=length,
            exception=error,
            context={},
        )


class GrpcUser(WorkloadUser):
    """Over gRPC streaming, all users on one connection."""

    scheme = "grpc"


class HttpUser(WorkloadUser):
    """Over HTTP: short answers through the unary front, long ones as server-sent events."""

    scheme = "http"


def prepare(workload: Workload, stock: int) -> None:
    """Sets the workload of all users of this process and makes its first pictures.

    The pictures are seeded at random, so that no other process and no earlier run, whose rows may still lie in the
    server's caches, had any of them.
    """
    WorkloadUser.workload = workload
    WorkloadUser.pictures = Pictures(workload, seed=secrets.randbits(64), stock=stock)
