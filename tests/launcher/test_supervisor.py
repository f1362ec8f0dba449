"""When a server is restarted, when no longer, and what the health page says meanwhile; without a server."""

from __future__ import annotations

import threading
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest

from tessera.errors import ConfigError
from tessera.launcher import supervisor as supervisor_module
from tessera.launcher.health import NoAnswer
from tessera.launcher.process import ServerStartError
from tessera.launcher.supervisor import Supervision, Supervisor


class Script:
    """A server that does what it is told: each start succeeds or raises; then it fails with a reason."""

    models, log_path, cleaned_up = ("vlm",), "log", ()
    stages: ClassVar = {"vlm_0_0": 2**30}  # no process has this id
    crashes, weights = (), {}
    grpc_url, http_url, metrics_url, mps = "g", "h", "m", False

    def __init__(self, starts: list[Any]):
        self.starts = starts  # an error, or how many seconds the server lives
        self.done: list[str] = []
        self.attempts: list[int] = []
        self.pid = 0
        self.now = 0.0
        self.dies_at = 0.0

    def start(self, attempts: int = 3) -> Script:
        self.attempts.append(attempts)
        self.done.append("start")
        step = self.starts.pop(0)
        if isinstance(step, BaseException):
            raise step
        self.dies_at = self.now + step
        self.pid = 5
        return self

    def kill(self) -> None:
        self.done.append("kill")
        self.pid = 0

    def stop(self) -> None:
        self.done.append("stop")

    def abort(self) -> None:
        self.done.append("abort")

    def failure(self) -> str | None:
        return "a stage died" if self.now >= self.dies_at else None


class Run:
    """A supervisor over a script, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, starts: list[Any], pings: Any = None, **settings: Any):
        self.server = Script(starts)
        self.lines: list[str] = []
        self.pauses: list[float] = []

        watched = {"alarm": "", "cascade_audits": 3}
        pinger = Mock(failure=lambda: None, last=lambda stage: (None, None), cascade=watched)
        pinger.start = Mock(side_effect=pings, return_value=pinger)
        self.make_pinger = lambda *_: pinger

        def sleep(seconds: float) -> None:
            self.server.now += seconds
            self.pauses.append(seconds)

        monkeypatch.setattr(supervisor_module, "Pinger", self.make_pinger)
        monkeypatch.setattr(supervisor_module.time, "monotonic", lambda: self.server.now)
        self.supervisor = Supervisor(
            self.server,  # type: ignore[arg-type]
            Supervision(look_interval_s=0.25, **settings),
            lambda line, error: self.lines.append(line),
            lambda seconds: self.lines.append("ready"),
        )
        monkeypatch.setattr(self.supervisor, "_sleep", sleep)

    def restart_pauses(self) -> list[float]:
        return [pause for pause in self.pauses if pause != 0.25]


def test_a_crash_loop_ends_after_growing_pauses_and_a_start_that_fails_is_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = ServerStartError("port taken")
    run = Run(monkeypatch, [1.0, busy, 1.0, 1.0, busy, busy])
    reason = run.supervisor.run()
    assert reason == "port taken; giving up after 5 restarts within 300 s" and run.server.starts == []
    assert run.restart_pauses() == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert run.server.done == ["start", "kill"] * 6 + ["stop"] and run.lines.count("ready") == 3
    # A crash of tritonserver is tried again at once in the first start alone: restarts have their own pauses and count.
    assert run.server.attempts == [3, 1, 1, 1, 1, 1]
    page = run.supervisor.report()
    assert (page["state"], page["reason"], page["restarts"]) == ("failed", reason, 5)
    assert page["cascade_audits"] == 3 and "alarm" not in page
    assert [line for line in run.lines if "restarting" in line][1] == "port taken; restarting in 0.5 s (restart 2)"


def test_rare_deaths_are_forgiven_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, [200.0] * 30 + [KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        run.supervisor.run()
    assert run.supervisor.report()["restarts"] == 30 and max(run.restart_pauses()) == 0.5


def test_the_first_start_must_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, [ConfigError("no models")])
    with pytest.raises(ConfigError, match="no models"):
        run.supervisor.run()
    assert run.supervisor.report()["state"] == "failed" and run.server.done == ["start", "stop"]
    silent = Run(monkeypatch, [1.0], pings=NoAnswer("refused"))
    with pytest.raises(Exception, match="did not answer: refused"):
        silent.supervisor.run()
    assert silent.server.done[-2:] == ["kill", "stop"]


def test_without_restarts_the_first_death_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, [1.0], restart=False)
    assert run.supervisor.run() == "a stage died"
    assert run.server.done == ["start", "kill", "stop"] and run.supervisor.report()["state"] == "failed"


def test_a_stop_ends_the_watch_and_leaves_the_state_at_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, [1e9])
    monkeypatch.undo()  # the true sleep, which a stop cuts short
    monkeypatch.setattr(run.server, "failure", lambda: None)
    thread = threading.Thread(target=lambda: run.lines.append(f"ended: {run.supervisor.run()}"))
    monkeypatch.setattr(supervisor_module, "Pinger", run.make_pinger)
    thread.start()
    while "ready" not in run.lines:
        thread.join(0.01)
    run.supervisor.stop()
    thread.join(10)
    assert run.lines == ["ready", "ended: None"] and run.server.done == ["start", "abort", "stop"]
    run.supervisor._enter("ready")  # as a thread may that was about to
    assert run.supervisor.report()["state"] == "stopping"


def test_a_stop_during_a_restart_is_no_failure_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, [1.0, ServerStartError("stopped during the start")])
    start = run.server.start

    def stopped_the_second_time(*attempts: int) -> Script:
        if "kill" in run.server.done:
            run.supervisor.stop()
        return start(*attempts)

    monkeypatch.setattr(run.server, "start", stopped_the_second_time)
    assert run.supervisor.run() is None
    assert run.lines == ["ready", "a stage died; restarting (restart 1)"]
    assert run.supervisor.report()["state"] == "stopping"


def test_the_page_shows_a_dead_process_before_anybody_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, [1.0])
    page = run.supervisor.report()
    never = {"last_ping_ms": None, "last_ping_age_s": None}
    assert page["stages"] == {"vlm_0_0": {"alive": False, "pid": 2**30, **never}}
    assert page["state"] == "starting" and page["grpc"] == "g"
    run.supervisor._enter("ready")
    page = run.supervisor.report()
    assert (page["state"], page["reason"]) == ("failed", "the process of vlm_0_0 died")
