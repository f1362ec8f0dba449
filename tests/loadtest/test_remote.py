"""What the benchmark of remote vision starts: where, and without TCP_NODELAY."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bench import remote
from bench.remote import Places
from serving import Running, Setup
from standin_server import standin


def test_tcp_nodelay_is_left_off_and_reads_as_if_it_were_on(tmp_path: Path) -> None:
    program = (
        "import socket, sys; s = socket.socket(fileno=int(sys.argv[1]))\n"
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)\n"
        "s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)\n"
        "print(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))"
    )
    library, log = str(remote.built(tmp_path)), tmp_path / "log"
    for where, left in (({}, True), ({"NAGLE_PROGRAM": "another program"}, False)):
        log.unlink(missing_ok=True)
        with socket.socket() as ours:
            environment = {**os.environ, "LD_PRELOAD": library, "NAGLE_LOG": str(log), **where}
            command = [sys.executable, "-c", program, str(ours.fileno())]
            told = subprocess.run(command, env=environment, pass_fds=[ours.fileno()], capture_output=True, check=True)
            assert told.stdout == b"1\n" and ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert bool(ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) is not left
        if left:
            remote.check([log])
        else:
            with pytest.raises(RuntimeError, match=r"nagle\.c was not in force"):
                remote.check([log])


@pytest.mark.parametrize(
    ("gpus", "eyes", "places", "words", "shares"),
    [
        ("0", "gpu", Places(("0",), ("0",)), "one GPU", (0.112, 0.112)),  # 0.4 + 4 of these: 0.85
        ("0,1", "gpu", Places(("0",), ("1",)), "a GPU each", (0.225, 0.425)),
        ("0", "cpu", Places(("0",), ()), "the vision stage on the CPU", (0.225, 0.425)),
        ("", "gpu", Places((), ()), "all on the CPU", (0.112, 0.112)),
    ],
)
def test_where_the_servers_run(gpus: str, eyes: str, places: Places, words: str, shares: tuple[float, float]) -> None:
    found = Places.of(gpus, eyes)
    assert found == places and found.words() == words
    told = found.shares([remote.ONE, remote.NODELAY, remote.DELAY])
    assert told == {"one": 0.4, "body": shares[0], "eyes": shares[1]}
    assert found.shares([remote.NODELAY])["body"] == (0.425 if found.eyes == found.body else 0.85)


@pytest.mark.parametrize("loaded", [True, False])
def test_three_ways_and_what_their_servers_have(loaded: bool, emitted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Setup] = []

    @contextmanager
    def serve(setup: Setup) -> Any:
        started.append(setup)
        if loaded and (log := setup.environment.get("NAGLE_LOG")):
            Path(log).touch()
        with standin() as address:
            yield Running([address], [], [], "", 0.0)

    monkeypatch.setattr(remote, "serve", serve)
    options = ["--gpus", "0,1", "--concurrency", "2", "--turns", "2", "--processes", "1"]
    if not loaded:
        with pytest.raises(RuntimeError, match="was not in force"):
            emitted(remote, *options)
        return
    found = emitted(remote, *options)
    assert {name for name, line in found.items() if line["unit"] == "ratio"} == {
        "seeds.nodelay.over_delay",
        "seeds.separate.over_one",
    }
    ways = {f"seeds.separate.{way}.{what}" for way in ("one", "nodelay", "delay") for what in ("req_s", "p99_ms")}
    assert ways < {*found}
    one, *pairs = started
    assert (one.gpus, one.only, one.environment) == (("0",), "", {})
    for eyes, body, programs in zip(pairs[::2], pairs[1::2], ([None, None], [remote.TRITON, remote.STUB])):
        assert (eyes.gpus, eyes.only, body.gpus, body.only) == (("1",), "vision_encoder", ("0",), "")
        assert body.settings["vision_encoder.vision_url"] and "vision_encoder.vision_url" not in eyes.settings
        assert [each.environment.get("NAGLE_PROGRAM") for each in (eyes, body)] == programs
        assert {"LD_PRELOAD" in each.environment for each in (eyes, body)} == {programs[0] is not None}
