"""The command that a benchmark starts its server with, for both kinds of checkout, and how the server's end is seen."""

import os
from pathlib import Path

import pytest
from serving import Setup, pairs, serve

READY = (
    "tessera: ready in 3.5 s: grpc h:1,h:2, http http://h:3,http://h:4, metrics http://h:5,http://h:6, "
    "health http://h:7, models vlm, log x"
)


def checkout(folder: Path, program: str) -> Path:
    """A checkout whose launcher is this program; it has two models."""
    launcher = folder / "python_backends" / "tessera" / "launcher"
    launcher.mkdir(parents=True)
    for package in (launcher.parent, launcher):
        (package / "__init__.py").touch()
    (launcher / "cli.py").write_text(program)
    for model in ("preprocess", "language_model"):
        (folder / "model_repository" / model / "__pycache__").mkdir(parents=True)
        (folder / "model_repository" / model / "config.pbtxt").touch()
    return folder


def test_the_addresses_are_those_it_says_and_it_is_told_to_stop(tmp_path):
    waits = f"""
import signal, sys
def stop(*_):
    open({str(tmp_path / "stopped")!r}, "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, stop)
print({READY!r}, flush=True)
signal.pause()
"""
    with serve(Setup(tree=checkout(tmp_path / "tree", waits))) as running:
        assert (running.grpc, running.metrics) == (["h:1", "h:2"], ["http://h:5", "http://h:6"])
        assert (running.http, running.health, running.startup_s) == (["http://h:3", "http://h:4"], "http://h:7", 3.5)
        assert not (tmp_path / "stopped").exists()
    assert (tmp_path / "stopped").exists()


def test_a_server_that_does_not_start_or_dies_is_an_error_with_its_words(tmp_path):
    refuses = checkout(tmp_path / "a", "raise SystemExit('no such checkpoint')")
    with pytest.raises(RuntimeError, match="did not start: no such checkpoint"), serve(Setup(tree=refuses)):
        pass
    dies = checkout(tmp_path / "b", f"print({READY!r}, flush=True)\nraise SystemExit('stage gone')")
    with pytest.raises(RuntimeError, match="ended with 1: stage gone"), serve(Setup(tree=dies)):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)


def test_pairs_are_name_and_value():
    assert pairs(["a.b=1", "c=d=e"], "NAME=VALUE") == {"a.b": "1", "c": "d=e"}
    for wrong in ("a.b", "=1", "a="):
        with pytest.raises(SystemExit, match="expected NAME=VALUE"):
            pairs([wrong], "NAME=VALUE")
