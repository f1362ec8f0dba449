"""`tessera serve` over toy models that hang, die and leave things behind; each starts in under a second."""

import glob
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from http_door import post
from toy_servers import Launched, all_gone, wait_until

from tessera.launcher import guard
from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server

pytestmark = [pytest.mark.server, pytest.mark.faults]


@pytest.fixture
def launched(toys: Path, tmp_path: Path) -> Iterator[Launched]:
    # The user's own choice of a control mode, in which models can be unloaded, is left to stand.
    explicit = ("--", "--model-control-mode=explicit", "--load-model=*")
    with Launched(toys, tmp_path / "log", "--ping-interval", "0.1", "--ping-timeout", "2", *explicit) as running:
        yield running


def ask(launched: Launched, text: str) -> str:
    body = {"inputs": [{"name": "IN", "shape": [1], "datatype": "BYTES", "data": [text]}]}
    status, answer = post(f"http://{launched.url('http')}/v2/models/echo/infer", body)
    assert status == 200, answer
    return json.loads(answer)["outputs"][0]["data"][0]


def test_a_busy_stage_and_an_unloaded_model_are_left_alone_and_one_that_hangs_is_restarted_on_the_same_ports(
    launched: Launched,
) -> None:
    with ThreadPoolExecutor(6) as pool:  # three seconds of work before the ping's turn, which has one
        assert list(pool.map(lambda _: ask(launched, "sleep"), range(6))) == ["sleep"] * 6
    pid, models = launched.health()["stages"]["count_0_0"]["pid"], f"http://{launched.url('http')}/v2/repository/models"
    post(f"{models}/count/unload", {})
    assert wait_until(lambda: all_gone([pid]))
    time.sleep(1.2)  # two looks at the processes
    post(f"{models}/count/load", {})
    assert wait_until(lambda: launched.health()["stages"].get("count_0_0", {}).get("pid") not in (None, pid))
    assert wait_until(lambda: launched.health()["stages"]["echo_0_0"]["last_ping_ms"] is not None)
    before = launched.health()
    assert before["state"] == "ready" and before["restarts"] == 0 and before["stages"]["count_0_0"]["alive"]
    assert set(before["stages"]) == {"tritonserver", "count_0_0", "echo_0_0"}

    os.kill(before["stages"]["echo_0_0"]["pid"], signal.SIGSTOP)  # alive, and does nothing
    assert wait_until(lambda: launched.health()["restarts"] == 1)
    assert wait_until(lambda: launched.health()["state"] == "ready")
    assert ask(launched, "again") == "again"  # at the address of the first line
    after = launched.health()
    assert after["restarts"] == 1 and after["reason"].startswith("echo has not answered for 2 s")
    assert Path(f"{launched.log}.1").exists()  # of the run before
    assert after["stages"]["echo_0_0"]["pid"] != before["stages"]["echo_0_0"]["pid"]
    launched.process.terminate()
    output, _ = launched.process.communicate(timeout=10)
    assert launched.process.returncode == 0 and output.count("tessera: ready in") == 1  # and the one read before
    (line,) = launched.errors().splitlines()
    assert "restarting (restart 1)" in line


def test_leftovers_of_a_killed_launcher_and_guard_go_with_the_next_start(toys: Path, tmp_path: Path) -> None:
    with Launched(toys, tmp_path / "log") as running:
        regions = running.regions()
        prefix = os.path.basename(regions[0]).rpartition("-")[0][:21]
        lock = guard.lock_path(prefix)
        assert os.path.exists(lock) and guard.remove_if_gone(prefix) == []  # its guard lives
        folder = Path(lock).read_text()
        assert os.path.isdir(folder)
        os.kill(running.pids[0], signal.SIGKILL)  # the guard first, or it would clean up
    assert wait_until(lambda: all_gone(running.pids[:1]))

    options = ServerOptions(toys, http_port=0, grpc_port=0, metrics_port=0, log_path=tmp_path / "log2")
    with Server(options) as server:
        # Whichever server of this machine started next has removed them: here not necessarily this one.
        assert not glob.glob(f"/dev/shm/{prefix}*") and not os.path.exists(folder) and not os.path.exists(lock)
        assert wait_until(lambda: all_gone(running.pids))
        assert server.failure() is None
    assert not os.path.exists(guard.lock_path(server.shm_prefix))
