"""`tessera serve --gpus 0,1` with toy models (a GPU's number is only a variable here) and the project's own front."""

import glob
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_door import post
from toy_servers import Launched, add_model, all_gone, wait_until

from clients import toy_model
from tessera.launcher.guard import descendants
from tessera.launcher.process import command_line
from tessera_client import Answer, Client, Models, Retry
from tessera_command.cli import main as tessera

pytestmark = [pytest.mark.server, pytest.mark.faults]

# Does not load, and so keeps its server from being ready, while there is a file with its GPU's number.
GATE = """
import os, time
from pathlib import Path

class TritonPythonModel:
    def initialize(self, args):
        closed = Path(args["model_repository"]).parent / f"closed{os.environ['CUDA_VISIBLE_DEVICES']}"
        while closed.exists():
            time.sleep(0.02)
"""
ROOT = Path(__file__).resolve().parents[2]
FRONT = ROOT / "model_repository" / "vlm_unary"
CHECKPOINT = ROOT / "build" / "default_model" / "checkpoint"  # which is checked before the start; the toys read none


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    for name in ("vlm", "language_model"):
        version = folder / name / "1"
        version.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(toy_model.config(name))
        (version / "model.py").write_text(Path(toy_model.__file__).read_text())
    add_model(folder, "gate", GATE, "TYPE_INT32")
    shutil.copytree(FRONT, folder / "vlm_unary", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def service(repository: Path) -> Iterator[Launched]:
    """Leaves nothing when it is told to end."""
    options = ("--gpus", "0,1", "--device", "cpu", "--ping-interval", "0.5", "--checkpoint", str(CHECKPOINT))
    with Launched(repository, repository / "server.log", *options) as running:
        yield running
        flags = [flag for pid in servers(running) for flag in command_line(pid) if "shm-region-prefix-name=" in flag]
        regions = [path for flag in flags for path in glob.glob(f"/dev/shm/{flag.rpartition('=')[2]}*")]
        left = descendants(running.process.pid)
        assert sum(map(os.path.isfile, regions)) == 8  # of four stubs each
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(10) == 0 and all_gone(left) and not any(map(os.path.exists, regions))


def addresses(service: Launched, protocol: str) -> list[str]:
    """Both servers' addresses, as the ready line has them."""
    return service.ready_line.split(f"{protocol} ")[1].split(", ")[0].split(",")


def servers(service: Launched) -> list[int]:
    """Process ids of the two tritonservers, that of GPU 0 first."""
    port = addresses(service, "grpc")[0].rpartition(":")[2]
    pids = [p for p in descendants(service.process.pid) if (command_line(p) or [""])[0].endswith("tritonserver")]
    return sorted(pids, key=lambda pid: f"--grpc-port={port}" not in command_line(pid))


def gpu(text: str) -> str:
    """At which GPU's server the toy answered."""
    return json.loads(text[text.index("{") :])["gpu"]


def gpus(answers: list[Answer]) -> Counter[str]:
    return Counter(gpu(answer.text) for answer in answers)


def front(address: str, text: str) -> str:
    """What the front of the server at this HTTP address answers to a request without an id."""
    return json.loads(post(f"{address}/v2/models/vlm_unary/generate", {"text_input": text})[1])["text_output"]


def test_two_servers_share_the_work(service: Launched, repository: Path) -> None:
    grpc, http = addresses(service, "grpc"), addresses(service, "http")
    assert len(set(grpc)) == len(set(http)) == 2
    for url in (",".join(grpc), http):
        with Client(url) as client:
            assert client.ready()
            assert gpus([client.ask(None, "q") for _ in range(6)]) == {"0": 3, "1": 3}
            for _ in range(2):
                with client.stream(None, "slow a b") as stream:
                    next(stream)
    # Each control request went where its stream was.
    assert [len((repository / f"cancelled{i}.txt").read_text().split()) for i in range(2)] == [2, 2]
    # The front of either server asks its own ensemble: it is clients that spread.
    for number, address in enumerate(http):
        assert {gpu(front(address, "q")) for _ in range(3)} == {str(number)}
    with Client(grpc[1], models=Models(vlm="vlm_unary")) as client:
        assert gpus([client.ask(None, "q") for _ in range(3)]) == {"1": 3}

    page = service.health()
    assert page["state"] == "ready" and list(page["servers"]) == ["gpu0", "gpu1"]
    assert all(stage["alive"] for stage in page["stages"].values()) and len(page["stages"]) == 10


def test_a_killed_server_comes_back_and_the_other_does_its_work_meanwhile(
    service: Launched, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = repository / "closed0"
    gate.touch()
    grpc, http = addresses(service, "grpc"), addresses(service, "http")
    first, second = servers(service)
    with Client(grpc, retry=Retry.patient()) as client:

        def kill_in_the_middle(done: int) -> None:
            if done == 20:
                os.kill(first, signal.SIGKILL)

        questions = [f"q{i}" for i in range(60)]
        answers = list(client.ask_many(((None, q) for q in questions), concurrency=4, progress=kill_in_the_middle))
        assert [answer.text.split()[0] for answer in answers] == questions
        assert set(gpus(answers)) == {"0", "1"}

        assert wait_until(lambda: service.health()["servers"]["gpu0"]["state"] == "restarting")
        page = service.health()
        assert (page["state"], page["servers"]["gpu1"]["state"]) == ("restarting", "ready")
        assert gpus([client.ask(None, "meanwhile") for _ in range(4)]) == {"1": 4}
        assert [gpu(front(http[1], "meanwhile")) for _ in range(4)] == ["1"] * 4
        assert tessera(["status", "--url", ",".join(grpc), "--health-url", service.url("health")]) == 3
        assert page["reason"].startswith("gpu0: ") and page["reason"] in capsys.readouterr().out

        gate.unlink()
        assert wait_until(lambda: service.health()["state"] == "ready", 30)
        assert servers(service)[0] != first and servers(service)[1] == second
        assert wait_until(lambda: set(gpus([client.ask(None, "again") for _ in range(4)])) == {"0", "1"})
    assert gpu(front(http[0], "again")) == "0"
    assert tessera(["status", "--url", ",".join(grpc), "--health-url", service.url("health")]) == 0
    assert "restarts 1" in capsys.readouterr().out
