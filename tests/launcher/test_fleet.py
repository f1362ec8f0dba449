"""Several supervised servers as one service; the supervisors play scripts."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tessera.errors import ConfigError, TesseraError
from tessera.launcher import supervisor as fleet_module
from tessera.launcher.options import ServerOptions
from tessera.launcher.supervisor import Fleet, Supervision


class Scripted:
    """A supervisor whose server becomes "ready", waits for an event, gives up for a reason, or fails with an error."""

    scripts: dict[str, list[Any]]

    def __init__(self, server: Any, supervision: Any, say: Any, ready: Any):
        self.server, self.say, self.ready = server, say, ready
        self.stopped = threading.Event()
        server.options = replace(server.options, http_port=80, metrics_port=82)
        server.models = ("vlm",)

    def run(self) -> str | None:
        for step in self.scripts[self.server.options.name]:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, threading.Event):
                assert step.wait(10)
            elif step == "ready":
                self.ready(1.25)
            else:
                return step
        assert self.stopped.wait(10)
        return None

    def stop(self) -> None:
        self.stopped.set()


class Lines(list[str]):
    """What is said; an event of `awaited` is set once a line holds its text."""

    def __init__(self, *awaited: str) -> None:
        super().__init__()
        self.awaited = {text: threading.Event() for text in awaited}

    def __call__(self, message: str, error: bool) -> None:
        self.append(message)
        for text, event in self.awaited.items():
            if text in message:
                event.set()


def made(monkeypatch: pytest.MonkeyPatch, say: Lines, scripts: dict[str, list[Any]], **supervision: Any) -> Fleet:
    monkeypatch.setattr(fleet_module, "Supervisor", Scripted)
    monkeypatch.setattr(Scripted, "scripts", scripts, raising=False)
    options = [
        ServerOptions(Path("m"), name=name, grpc_port=8001 + 10 * i, log_path=Path("log"))
        for i, name in enumerate(scripts)
    ]
    return Fleet(options, Supervision(**supervision), say)


def test_one_line_when_all_are_ready_and_one_for_each_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    say = Lines("127.0.0.1:8001,127.0.0.1:8011", "gpu1: ready")
    both, back = say.awaited.values()
    fleet = made(monkeypatch, say, {"gpu0": ["ready", back, "dies"], "gpu1": ["ready", both, "ready", back, "dies"]})
    assert "dies (log" in fleet.run()
    fleet.stop()
    first, again, *_ = say
    assert ": grpc 127.0.0.1:8001,127.0.0.1:8011, http http://127.0.0.1:80,http" in first and "log-gpu1" in first
    assert again.startswith("gpu1: ready in 1.2 s: grpc 127.0.0.1:8011, http")


@pytest.mark.parametrize("restart", [True, False])
def test_a_server_that_is_given_up_leaves_the_others_to_go_on_unless_nothing_is_restarted(
    monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    say = Lines("the other servers go on")
    last: list[Any] = [*say.awaited.values(), "it dies too"] if restart else []
    fleet = made(monkeypatch, say, {"gpu0": ["ready", "it dies"], "gpu1": ["ready", *last]}, restart=restart)
    assert fleet.run() == ("gpu1: it dies too (log: log-gpu1)" if restart else "gpu0: it dies (log: log-gpu0)")
    told = ["stopped: gpu0: it dies (log: log-gpu0); the other servers go on"]
    assert [line for line in say if "stopped" in line] == told * restart
    fleet.stop()  # and ends the other


def test_a_first_start_that_fails_is_raised_with_its_servers_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = made(monkeypatch, Lines(), {"gpu0": ["ready"], "gpu1": [ConfigError("no models")]})
    with pytest.raises(TesseraError, match="^gpu1: no models$"):
        fleet.run()
    fleet.stop()
