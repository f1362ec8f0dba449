"""What is shown of a start: from the server's log, in a terminal and without one."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from tessera.launcher import starting
from tessera.launcher.starting import Progress

LOG = (
    'I1123 21:01:30.777844 17598 model_lifecycle.cc:472] "loading: language_model:1"\n',
    'I1123 21:01:30.777876 17598 model_lifecycle.cc:472] "loading: preprocess:1"\n',
    'I1123 21:01:30.777876 17598 model_lifecycle.cc:472] "loading: vlm_unary:1"\n',
    "I1123 21:01:32.437737 17598 model_lifecycle.cc:839] \"successfully loaded 'vlm_unary'\"\n",
    "I1123 21:01:35.727847 17598 model_lifecycle.cc:839] \"successfully loaded 'preprocess'\"\n",
    "language_model: cache: 16384 blocks of 16 tokens\nother: line\n",
    "I1123 21:01:37.033656 17598 model_lifecycle.cc:839] \"successfully loaded 'language_model'\"\n",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(starting, "time", clock)
    return clock


def play(progress: Progress, clock: Any, server: str = "", parts: tuple[str, ...] = LOG) -> None:
    """The log as it grows, a second for each part, and each in two pieces, the second of which ends its line."""
    log = ""
    for part in parts:
        progress.read(server, log + part[:20])
        log += part
        progress.read(server, log)
        clock.now += 1.0


def test_without_a_terminal_each_stage_is_a_plain_line(clock: Any) -> None:
    out = io.StringIO()
    progress = Progress(out)
    play(progress, clock)
    progress.gateway(ready=False)
    progress.gateway(ready=True)
    assert out.getvalue() == "tessera: preprocess loaded in 3.0 s\ntessera: language_model loaded in 6.0 s\n"
    progress.end()
    play(progress, clock)  # of a restart, which has lines of its own
    assert out.getvalue().count("\n") == 2


def test_what_takes_long_is_named_again(clock: Any) -> None:
    out = io.StringIO()
    progress = Progress(out)
    play(progress, clock, "gpu1", LOG[:1])
    for _ in range(7):
        clock.now += 10.0
        progress.read("gpu1", LOG[0] + LOG[5])
    assert out.getvalue().splitlines() == [
        f"tessera: gpu1: language_model has been loading for {seconds} s (cache: 16384 blocks of 16 tokens)"
        for seconds in (31, 61)
    ]


def test_a_start_after_a_crash_begins_again(clock: Any) -> None:
    out = io.StringIO()
    progress = Progress(out)
    play(progress, clock, "gpu0", LOG[:5])
    play(progress, clock, "gpu1", LOG[:5])
    play(progress, clock, "gpu0")
    assert [line.split(" in ")[0] for line in out.getvalue().splitlines()] == [
        "tessera: gpu0: preprocess loaded",
        "tessera: gpu1: preprocess loaded",
        "tessera: gpu0: preprocess loaded",
        "tessera: gpu0: language_model loaded",
    ]


def test_in_a_terminal_it_is_a_table(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    progress = Progress(out)
    play(progress, clock)
    progress.gateway(ready=False)
    clock.now += 2.0
    progress.gateway(ready=True)
    progress.end()
    progress.end()
    plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", out.getvalue())
    last = [" ".join(line.split()) for line in plain.splitlines()[-4:]]
    assert last == ["+ language_model 6.0 s", "+ preprocess 3.0 s", "+ vlm_unary 1.0 s", "+ gateway 2.0 s"]
    assert "tessera: " not in plain and out.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"


def test_a_dumb_terminal_gets_lines(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    play(Progress(out), clock)
    assert "\x1b" not in out.getvalue() and out.getvalue().count("\n") == 2
