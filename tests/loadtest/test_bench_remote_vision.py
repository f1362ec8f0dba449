"""The remote vision benchmark's own means: framing, the socket option, and figures by name."""

from __future__ import annotations

import json
import socket

import bench_remote_vision
import pytest


@pytest.mark.parametrize("no_delay", [True, False])
def test_messages_come_back_whole_and_the_option_is_what_was_asked(no_delay):
    with bench_remote_vision.echo(no_delay) as connection:
        assert bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) is no_delay
        for body in (b"x", bytes(range(256)) * 300):
            bench_remote_vision.write(connection, body)
            assert bench_remote_vision.read(connection) == body


def test_both_settings_are_reported(capsys):
    bench_remote_vision.nagle(messages=5, size=64)
    found = {line["metric"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(found) == {f"remote.nagle.{which}.{what}" for which in ("on", "off") for what in (
        "messages_s", "p50_ms", "p99_ms",
    )}  # fmt: skip
    assert all(line["value"] > 0 and line["messages"] == 5 for line in found.values())
