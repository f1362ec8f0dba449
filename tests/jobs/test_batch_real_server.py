"""`tessera batch` before a real tritonserver with the default model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from workloads import picture

from tessera.launcher.process import Server
from tessera_client import Client
from tessera_command.cli import main

pytestmark = pytest.mark.server
Capture = pytest.CaptureFixture[str]

PROMPT = "Is there a crack in the wall?"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pictures, two of them equal, and among them a poisoned one."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(10):
        (folder / f"{number}.jpg").write_bytes(picture(112, 112, number))
    (folder / "same.jpg").write_bytes(picture(112, 112, 3))
    (folder / "cut.jpg").write_bytes(picture(112, 112, 4)[:400])
    return folder


def test_each_picture_has_its_answer_and_the_poisoned_one_its_reason(
    server: Server, photos: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out.jsonl"
    sampling = ["--max-tokens", "3", "--max-tiles", "1"]
    assert main(["batch", str(photos), "--prompt", PROMPT, "-o", str(out), "--url", server.grpc_url, *sampling]) == 1
    assert capsys.readouterr().out.rstrip().endswith("1 the same as another")
    found = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert sorted(found) == sorted(path.name for path in photos.iterdir())
    bad = found.pop("cut.jpg")
    assert bad["answer"] is None and bad["error"].startswith("InvalidRequest: ") and "image" in bad["error"]
    with Client(server.grpc_url) as client:
        for name in ("0.jpg", "same.jpg"):
            answer = client.ask(photos / name, PROMPT, max_tokens=3, max_tiles=1)
            assert found[name]["answer"] == answer.text and found[name]["finish_reason"] == answer.finish_reason
    assert {found["3.jpg"].get("same_as"), found["same.jpg"].get("same_as")} in ({None, "3.jpg"}, {None, "same.jpg"})


def test_a_dry_run_counts_as_the_server_does(server: Server, photos: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = [str(photos), "--prompt", PROMPT, "-o", str(tmp_path / "out.jsonl"), "--url", server.grpc_url]
    assert main(["batch", *arguments, "--dry-run", "--max-tokens", "3", "--max-tiles", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    with Client(server.grpc_url) as client:
        (plan,) = client.plan(photos / "0.jpg", max_tiles=1)
        usage = client.ask(photos / "0.jpg", PROMPT, max_tokens=3, max_tiles=1).usage
    assert usage is not None and found["failed"] == 1 and found["left"] == 12
    assert (found["units"], found["image_tokens"], found["prompt_tokens"]) == (1, plan.tokens, usage.prompt_tokens)


@pytest.mark.faults
def test_a_job_that_is_killed_loses_and_doubles_nothing(server: Server, photos: Path, tmp_path: Path) -> None:
    rows, out = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    names = [f"r{number}" for number in range(60)]
    with rows.open("w") as file:
        for number, name in enumerate(names):
            row = {"id": name, "image": str(photos / f"{number % 10}.jpg"), "question": f"Is wall {number} cracked?"}
            file.write(json.dumps(row) + "\n")
    command = [sys.executable, "-m", "tessera_command.cli", "batch", str(rows), "-o", str(out), "--concurrency", "4"]
    command += ["--url", server.grpc_url, "--max-tokens", "2", "--max-tiles", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    first = subprocess.Popen(command, env=environment)
    while not (out.exists() and out.read_bytes().count(b"\n") >= 10):
        assert first.poll() is None
        time.sleep(0.005)
    first.kill()
    assert first.wait() == -signal.SIGKILL
    assert out.read_bytes().count(b"\n") < len(names)
    subprocess.run(command, env=environment, check=True, timeout=120)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["id"] for row in found) == sorted(names)
    assert all(row["answer"] for row in found)
