"""A gateway's process that is killed, again and again, in the middle of a batch."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from batch_files import answers, client_of, create, line, over, rows
from gateway_doubles import started

PROGRAM = """
import json, os, signal, sys, threading
from clients.fake_transport import FakeTransport, final
from tessera_client import client
from tessera_client.transports.base import Sent
from tessera_gateway.cli import gateway_main

folder, kill_at = os.environ["FOLDER"], int(os.environ["KILL_AT"])
log = os.open(folder + "/asked", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

class Killing(FakeTransport):
    "Answers out of order, by threads; its process dies at the request of that number."
    def send(self, request, request_id, timeout, deliver):
        text = json.loads(request.messages)[-1]["content"][0]["text"]
        with self._lock:
            self.requests.append(text)
            os.write(log, f"{text}\\n".encode())
            if len(self.requests) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        def answer():
            deliver(final(f"answer to {text}"))
            deliver(None)
        threading.Timer(len(self.requests) % 3 * 0.002, answer).start()
        return Sent(lambda: None, lambda: None)

client.open_transport = lambda url, models: Killing()
sys.exit(gateway_main([*sys.argv[1:], "--workers", "1", "--batch-folder", folder, "--batch-concurrency", "8"]))
"""


def test_no_id_is_lost_or_answered_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gateway(kill_at: int) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
        monkeypatch.setenv("KILL_AT", str(kill_at))
        return started(program=("-c", PROGRAM))

    monkeypatch.setenv("FOLDER", str(tmp_path))
    names = [f"r{number}" for number in range(300)]
    lines = [line(name) for name in names]
    lines[150] = "nonsense"
    # Of two on a folder the second goes on where the first is killed; and a new one where both are.
    with gateway(80) as (first, address), gateway(80) as (second, _), client_of(address) as client:
        batch = create(client, *lines)
        assert first.wait(60) == second.wait(60) == -signal.SIGKILL
    with gateway(0) as (_, address), client_of(address) as client:
        batch = over(client, client.batches.retrieve(batch.id))
        found, failed = answers(client, batch), rows(client, batch.error_file_id)
    assert found == {name: f"answer to {name}" for name in names if name != "r150"}
    assert list(found) == [name for name in names if name in found]  # in the order of the lines
    assert [row["error"]["message"][:8] for row in failed] == ["line 151"]
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (300, 299, 1)
    # What was over before a kill is not asked again: twice only what was under way.
    asked = Counter((tmp_path / "asked").read_text().split())
    assert sum(asked.values()) - 299 <= 2 * 8 and set(asked) == set(found)
