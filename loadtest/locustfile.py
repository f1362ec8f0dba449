"""Locust drives a running server with one of the standard workloads.

    pip install -r requirements-loadtest.txt
    locust -f loadtest/locustfile.py --headless --workload W4b --run-time 2m --host localhost:8001 GrpcUser
    locust -f loadtest/locustfile.py --headless --workload W1 --run-time 2m --host localhost:8000 HttpUser

Without ``--users`` the workload's own concurrency is used. Without ``--headless`` there is a page on port 8089. One
Locust process is one core: above some tens of requests a second add ``--processes 4``. The figures that count come
from the benches; this is for watching a server under load.
"""

from __future__ import annotations

from typing import Any

from locust import events
from users import GrpcUser, HttpUser, prepare
from workloads import WORKLOADS

__all__ = ["GrpcUser", "HttpUser"]


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="W1", help="which standard workload")
    parser.add_argument(
        "--stock", type=int, default=256, help="pictures that each process makes before the load begins"
    )


@events.init.add_listener
def on_init(environment: Any, **_: Any) -> None:
    options = environment.parsed_options
    workload = WORKLOADS[options.workload]
    if options.num_users is None:
        options.num_users = workload.concurrency
        options.spawn_rate = options.spawn_rate or workload.concurrency
    prepare(workload, options.stock)
