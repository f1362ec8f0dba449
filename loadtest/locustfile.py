"""Locust drives a running server, or any of OpenAI's API, with one of the standard workloads.

    make loadtest ARGS="--workload W4b --run-time 2m --host localhost:8001 GrpcUser"
    make loadtest ARGS="--workload W1 --shape spike --host localhost:8000 HttpUser"
    make loadtest ARGS="--shape mix --users 32 --host localhost:9000 OpenAiUser"

or, for the page on port 8089, `locust -f loadtest/locustfile.py --host localhost:8001 GrpcUser`. Without ``--users``
the workload's own concurrency is used. One Locust process is one core, and past ``--stock`` pictures it makes some 100
new ones a second at most: above that add ``--processes 4``. The figures that count come from the benches; this is for
watching a server under load.
"""

from __future__ import annotations

from typing import Any

import gevent
from closed_loop import SECONDS, users_at
from locust import LoadTestShape, events
from locust.runners import MasterRunner, WorkerRunner
from users import GrpcUser, HttpUser, OpenAiUser, prepare
from workloads import WORKLOADS

__all__ = ["GrpcUser", "HttpUser", "OpenAiUser", "Shape"]

HEADLESS_S = 60.0
"""How long a run lasts that nobody can stop by the page, where neither ``--run-time`` nor its shape says it."""
QPM_S = 5
"""The seconds that a sample of the questions per minute is about."""


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    def add(flag: str, **how: Any) -> None:
        parser.add_argument(flag, **how)

    add("--workload", choices=sorted(WORKLOADS), default="W1", include_in_web_ui=False, help="which standard workload")
    add("--shape", choices=list(SECONDS), default="steady", help="how many users when; mix: 98 of 100 questions have "
        "short answers, one a long prompt, one a long answer")  # fmt: skip
    add("--stock", type=int, default=256, include_in_web_ui=False,
        help="pictures that each process makes before the load begins")  # fmt: skip
    add("--again", action="store_true", include_in_web_ui=False,
        help="deal the stock again and again: for targets that have no cache")  # fmt: skip


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
        prepare(workload, options.stock, options.again)


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
