"""Locust drives a running server, or any of OpenAI's API, with one of the standard workloads.

    make loadtest ARGS="--workload W4b --run-time 2m --host localhost:8001 GrpcUser"
    make loadtest ARGS="--workload W1 --shape spike --host localhost:8000 HttpUser"
    make loadtest ARGS="--shape mix --users 32 --host localhost:9000 OpenAiUser"

or, for the page on port 8089, `locust -f loadtest/locustfile.py --host localhost:8001 GrpcUser`. Without ``--users``
the workload's own concurrency is used. One Locust process is one core, and past its stock of pictures it makes some
100 new ones a second at most: above that add ``--processes 4``. The figures that count come from the benches; this is
for watching a server under load.

Importing locust makes the standard library cooperative; gRPC's C core must be told so before its first channel.
"""

from __future__ import annotations

import random
import secrets
import time
from contextlib import ExitStack
from typing import Any

import gevent
from closed_loop import SECONDS, users_at
from grpc.experimental import gevent as grpc_gevent
from locust import LoadTestShape, User, constant, events, task
from locust.runners import MasterRunner, WorkerRunner
from open_loop import LONG_ANSWER, LONG_PROMPT, SHORT
from targets import AskAbout, Asker, OpenAiAsker, TesseraAsker
from workloads import WORKLOADS, Pictures, Workload

grpc_gevent.init_gevent()

HEADLESS_S = 60.0
"""How long a run lasts that nobody can stop by the page, where neither ``--run-time`` nor its shape says it."""
STOCK = 256
"""Pictures that each process makes before the load begins."""
QPM_S = 5
"""The seconds that a sample of the questions per minute is about."""


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


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    add = parser.add_argument
    add("--workload", choices=sorted(WORKLOADS), default="W1", include_in_web_ui=False, help="which standard workload")
    add("--shape", choices=list(SECONDS), default="steady", help="how many users when; mix: 98 of 100 questions have "
        "short answers, one a long prompt, one a long answer")  # fmt: skip


@events.init.add_listener
def on_init(environment: Any, **_: Any) -> None:
    options = environment.parsed_options
    workload = WORKLOADS[options.workload]
    if options.num_users is None:
        options.num_users = workload.concurrency
    options.spawn_rate = options.spawn_rate or options.num_users
    if options.run_time is None and options.headless:
        options.run_time = SECONDS[options.shape] or HEADLESS_S
    if not isinstance(environment.runner, MasterRunner):
        # Seeded at random: no other process and no earlier run, whose rows may still lie in the server's caches, had
        # any of them.
        WorkloadUser.workload = workload
        WorkloadUser.pictures = Pictures(workload, secrets.randbits(64), STOCK)


@events.test_start.add_listener
def on_start(environment: Any, **_: Any) -> None:
    if not isinstance(environment.runner, WorkerRunner):  # the process that counts the answers of all
        gevent.spawn(sample_qpm, environment)


def sample_qpm(environment: Any) -> None:
    """Makes questions per minute, every few seconds of the run, a statistic beside the times."""
    runner, before = environment.runner, 0
    while runner.state in ("ready", "spawning", "running"):
        gevent.sleep(QPM_S)
        total = environment.stats.total
        answered = total.num_requests - total.num_failures
        if answered > before:
            environment.stats.get("of all users", "QPM").log(60 / QPM_S * (answered - before), 0)
        before = answered


class Shape(LoadTestShape):
    """The one of ``--shape``, for ``--users`` and ``--run-time``."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        options: Any = self.runner.environment.parsed_options
        lasts, passed = options.run_time or SECONDS[options.shape], self.get_run_time()
        if lasts and passed > lasts:
            return None
        return users_at(options.shape, passed / lasts if lasts else 0.0, options.num_users), options.spawn_rate
