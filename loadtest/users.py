"""Locust's users: each keeps one request of a standard workload under way, and asks as load.py does (targets.py).

Importing this needs locust (requirements-loadtest.txt), which makes the standard library cooperative; gRPC's C core
must be told so before its first channel.
"""

from __future__ import annotations

import random
import secrets
import time
from contextlib import ExitStack

from grpc.experimental import gevent as grpc_gevent
from locust import User, constant, task
from open_loop import LONG_ANSWER, LONG_PROMPT, SHORT
from targets import AskAbout, Asker, OpenAiAsker, TesseraAsker
from workloads import WORKLOADS, Pictures, Workload

grpc_gevent.init_gevent()


class WorkloadUser(User):
    """Asks one question after the other without a pause, so that users are requests in flight.

    All users of a process share one connection, or what takes its place, as the threads of a program would. Locust's
    table has the whole answers under the workload's name; beside them, and not counted as requests, the time to the
    first token (``TTFT``, of streamed answers) and the time for each further token (``ms/token``, whose average is the
    figure: Locust rounds single times to whole milliseconds).
    """

    abstract = True
    wait_time = constant(0)
    scheme: str
    asker: type[Asker]
    workload: Workload = WORKLOADS["W1"]
    pictures: Pictures = Pictures(workload, seed=0)
    timeout: float = 600.0
    _asking: dict[str, AskAbout] = {}  # noqa: RUF012 (shared on purpose)
    _connections = ExitStack()  # for as long as the process lives

    @task
    def ask(self) -> None:
        workload = self.workload
        if self.environment.parsed_options.shape == "mix":
            workload = random.choices((random.choice(SHORT), LONG_PROMPT, LONG_ANSWER), (98, 1, 1))[0]
        picture = self.pictures.deal()
        for prompt in workload.prompts:
            self._ask(picture, workload, prompt)

    def _ask(self, picture: bytes, workload: Workload, prompt: str) -> None:
        began, error = time.perf_counter(), None
        try:
            reply = self._connection()(picture, workload, prompt)
        except Exception as caught:
            error = caught
        seconds = time.perf_counter() - began
        self.environment.events.request.fire(
            request_type=self.scheme,
            name=workload.name,
            response_time=1e3 * seconds,
            response_length=0,
            exception=error,
            context={},
        )
        if error is not None:
            return
        first = None if reply.first is None else reply.first - began
        if first is not None:
            self._note("TTFT", workload, first)
        if reply.tokens > 1:
            # Of an answer that came whole, its prompt's time is in it.
            self._note("ms/token", workload, seconds / reply.tokens if first is None
                       else (seconds - first) / (reply.tokens - 1))  # fmt: skip

    def _note(self, what: str, workload: Workload, seconds: float) -> None:
        """A statistic that is no request: Locust's totals do not count it."""
        self.environment.stats.get(workload.name, what).log(1e3 * seconds, 0)

    def _connection(self) -> AskAbout:
        host = (self.host or self.environment.host or "localhost").rpartition("://")[2]
        if (ask := self._asking.get(host)) is None:
            addresses = [self._address(each) for each in host.split(",")]
            # No retries: a refused request is a failure in Locust's table, not a slow success.
            connection = self.asker(addresses, self.workload, 0, self.timeout).connection()
            ask = self._asking[host] = self._connections.enter_context(connection)
        return ask

    def _address(self, host: str) -> str:
        return f"{self.scheme}://{host}"


class GrpcUser(WorkloadUser):
    """Over gRPC streaming, all users on one connection."""

    scheme, asker = "grpc", TesseraAsker


class HttpUser(WorkloadUser):
    """Over tritonserver's HTTP: short answers through the unary front, long ones as server-sent events."""

    scheme, asker = "http", TesseraAsker


class OpenAiUser(WorkloadUser):
    """Over OpenAI's chat completions: the gateway, or anybody else's server; a connection for each user."""

    scheme, asker = "openai", OpenAiAsker

    def _address(self, host: str) -> str:
        return host


class SamePictures(Pictures):
    """The stock again and again: for servers that do nothing, which know no picture again."""

    def deal(self) -> bytes:
        self._stock.rotate()
        return self._stock[0]


def prepare(workload: Workload, stock: int, again: bool) -> None:
    """Sets the workload of all users of this process and makes its first pictures.

    The pictures are seeded at random, so that no other process and no earlier run, whose rows may still lie in the
    server's caches, had any of them.

    Args:
        stock: how many are made now.
        again: deal these for ever, not new ones afterwards.
    """
    WorkloadUser.workload = workload
    WorkloadUser.pictures = (SamePictures if again else Pictures)(workload, secrets.randbits(64), stock)
