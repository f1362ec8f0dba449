"""The gateway as processes: `tessera gateway` with several workers, and as the launcher's child."""

import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_doubles import ASKED, FROM_ABOVE, NOBODY, TRACE, collecting, free_port, is_there, started
from server.toy_servers import wait_until

from tessera.errors import ConfigError
from tessera.launcher.gateway import Gateway
from tessera.launcher.guard import descendants
from tessera.launcher.process import command_line
from tessera_gateway.cli import gateway_main, server_config
from tessera_gateway.settings import Settings


@pytest.mark.parametrize(("workers", "way"), [(1, signal.SIGINT), (2, None)])
def test_it_ends_in_order_and_leaves_nothing(
    workers: int, way: signal.Signals | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C, and with its launcher. Several workers count together, and send what they have seen to the last; the
    port is free at once."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    flags = ("--with-parent", f"--workers={workers}", "--drain=0.2", f"--batch-folder={tmp_path / 'new' / 'folder'}")
    with collecting() as (collector, spans), started(*flags, f"--otel={collector}") as (process, url):
        assert workers == 1 or wait_until(lambda: len(descendants(process.pid)) > workers)  # and a resource tracker
        for _ in range(10):
            assert is_there(url) and httpx.get(f"{url}/v1/batches", trust_env=False).json()["data"] == []
        page = httpx.get(f"{url}/metrics", trust_env=False).text
        counted = dict(line.rsplit(" ", 1) for line in page.splitlines())
        assert float(counted['tessera_gateway_requests_total{status="200"}']) >= 20
        completions = f"{url}/v1/chat/completions"  # its server is not there
        refusal = httpx.post(completions, json=ASKED, headers=FROM_ABOVE, timeout=30, trust_env=False)
        assert refusal.status_code == 503 and refusal.json()["error"]["code"] == "server_unavailable"
        assert process.stdin is not None
        process.send_signal(way) if way else process.stdin.close()
        process.stdin = None
        with pytest.raises(httpx.TransportError):
            while True:
                httpx.get(f"{url}/version", trust_env=False, timeout=5)
        _, said = process.communicate(timeout=20)
        assert process.returncode in (0, -signal.SIGINT, -signal.SIGTERM) and "Traceback" not in said
        assert not list((tmp_path / "tmp").iterdir())
    assert set(spans) == {"POST /v1/chat/completions", "chat vlm"}
    assert all((span.trace_id.hex(), span.status.code) == (TRACE, 2) for span in spans.values())  # 2: an error


def test_a_client_gives_a_quiet_connection_up_before_the_gateway_does() -> None:
    """Where both keep it for 5 s, as httpx and uvicorn do, now and then a request goes out on a line just closed."""
    assert server_config(Settings()).timeout_keep_alive > 10 * (httpx.Limits().keepalive_expiry or 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "0"], "--workers must be above 0"),
        (["--timeout", "inf"], "at most 1e+09"),
        (["--port", "70000"], "port must be 0-65535"),
        (["--url", "ftp://a"], "not a server address"),
        (["--keys", "/nowhere/keys"], "/nowhere/keys"),
        (["--fetch-from", "a,"], "empty name"),
        (["--batch-folder", "/dev/null/here"], "Not a directory: '/dev/null"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):  # argparse's way
        assert gateway_main(["--port", "0", *flags]) == 1
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_without_a_lock_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And not served, with batches that nobody ever asks."""
    (tmp_path / "lock").mkdir()
    assert gateway_main(["--port", "0", "--batch-folder", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "lock cannot be opened: Is a directory" in said and "give another --batch-folder" in said


def test_the_launchers_child_is_started_again_where_it_was_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that fails is tried again, and a stop ends one that is on its way."""
    monkeypatch.setattr("tessera.launcher.process.FIRST_PAUSE_S", 0.01)
    said: list[str] = []
    folder = f"--batch-folder={tmp_path / 'batches'}"
    child = Gateway("127.0.0.1", free_port(), lambda message, error: said.append(message), [folder])
    began, go_on = threading.Event(), threading.Event()
    real, tries = subprocess.Popen, []

    def popen(*arguments: Any, **options: Any) -> Any:
        tries.append(arguments)
        if len(tries) == 2:
            raise OSError("no memory")
        if len(tries) == 4:
            began.set()
            go_on.wait(10)
        return real(*arguments, **options)

    monkeypatch.setattr("tessera.launcher.process.subprocess.Popen", popen)
    child.start([NOBODY], ["http://127.0.0.1:1/metrics"])
    url, first = child.url, child.pid
    assert is_there(url)
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: len(said) == 3, 30) and is_there(url) and child.pid != first
    ended = "the gateway ended: killed by signal 9; restarting"
    assert said == [ended, ended, f"the gateway is ready again: {url}"]
    assert httpx.get(f"{url}/v1/batches", timeout=5, trust_env=False).json()["data"] == []
    os.kill(child.pid, signal.SIGKILL)
    assert began.wait(10)
    stopping = threading.Thread(target=child.stop, daemon=True)
    stopping.start()
    assert wait_until(lambda: child._stopping.is_set())
    time.sleep(0.1)  # stop() has ended the dead one, and waits for the watcher
    go_on.set()
    stopping.join(10)
    assert not stopping.is_alive() and not command_line(child.pid) and not is_there(url)


def test_what_cannot_work_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(words: str, *options: str, port: int = 0) -> None:
        with pytest.raises(ConfigError, match=words):
            Gateway("127.0.0.1", port, lambda *_: None, options)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(rf"port {port} on 127.0.0.1 is already in use \(--openai-port\)", port=port)
        assert gateway_main(["--port", str(port)]) == 1
        assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    refused("the gateway: .*No such file or directory: .*/keys", f"--keys={tmp_path}/keys")
    monkeypatch.setattr("tessera.launcher.gateway.NEEDS", ("tessera_gateway", "no_such_package"))
    refused("needs no_such_package, not installed here; --openai-port 0")
