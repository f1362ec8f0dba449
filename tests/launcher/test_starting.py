"""What is shown of a start, from the server's log, in a terminal and without one; one clear line where it fails."""

import io
import re
from pathlib import Path
from typing import Any

import pytest

from tessera.errors import ConfigError
from tessera.launcher import starting
from tessera.launcher.starting import Progress, check_repository, explain_log, failed_models

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


@pytest.mark.parametrize("out", [io.StringIO, Terminal])
def test_without_a_terminal_or_in_a_dumb_one_each_stage_is_a_plain_line(
    out: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = out()
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


# Lines as tritonserver 2.51 writes them.
PYTHON_ERROR = (
    r"E1121 02:18:24.080653 6017 model_lifecycle.cc:642] \"failed to load 'broken' version 1: Internal: ValueError: "
    r"weights of layer 3 are missing\n\nAt:\n  /models/broken/1/model.py(5): initialize\n\"" + "\n"
).replace('\\"', '"')
NO_FILE = (
    "I1121 02:18:23.742021 6040 pb_stub.cc:2105]  Failed to preinitialize Python stub: "
    "Python model file not found in '/models/nofile/1/model.py'\n"
)
GRPC_PORT = (
    'E1121 02:28:30.568298 8207 main.cc:245] "failed to start GRPC service: Unavailable - '
    "Socket '127.0.0.1:18601' already in use \"\n"
)
LAST = "error: creating server: Internal - failed to load all models\n"


@pytest.mark.parametrize(
    "log, line",
    [
        (
            PYTHON_ERROR + LAST,
            "model 'broken' failed to load: ValueError: weights of layer 3 are missing [/models/broken/1/model.py(5): "
            "initialize]",
        ),
        (NO_FILE, "model 'nofile' failed to load: Python model file not found in '/models/nofile/1/model.py'"),
        (GRPC_PORT, "127.0.0.1:18601 is already in use (GRPC service)"),
        (
            "E1121 02:35:14.141234 31916 model_repository_manager.cc:1415] \"failed to poll model 'nope': model not "
            'found in any model repository."\n' + LAST,
            "failed to poll model 'nope': model not found in any model repository.",
        ),
        (
            "error: creating server: Internal - failed to stat file /nope\n",
            "creating server: Internal - failed to stat file /nope",
        ),
        ('I1121 02:28:33 1 main.cc:1] "all is well"\n', None),
    ],
)
def test_the_reason_is_taken_from_the_log(log: str, line: str | None) -> None:
    assert explain_log(log) == line
    assert sorted(failed_models(PYTHON_ERROR + NO_FILE)) == ["broken", "nofile"]


def test_a_repository_is_checked_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        check_repository(tmp_path / "none")
    with pytest.raises(ConfigError, match="no models in"):
        check_repository(tmp_path)
    model = tmp_path / "m"
    (model / "configs").mkdir(parents=True)
    (model / "config.pbtxt").write_text('name: "m"\nbackend: "python"\n')
    with pytest.raises(ConfigError, match="model 'm' has no version"):
        check_repository(tmp_path)
    (model / "1").mkdir()
    with pytest.raises(ConfigError, match=r"model 'm' has no model file: .*m/1/model\.py is missing"):
        check_repository(tmp_path)
    # a named configuration may make it a model of another backend
    (model / "configs" / "plan.pbtxt").write_text('name: "m"\nbackend: "tensorrt"\n')
    check_repository(tmp_path, "plan")
    (model / "1" / "model.py").touch()
    check_repository(tmp_path)
