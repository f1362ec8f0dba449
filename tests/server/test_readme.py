"""The README's commands, typed as they stand: in a folder that holds nothing but what `tessera sample` writes."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_servers import Launched

from tessera.launcher import cli as launcher
from tessera.launcher.process import Server
from tessera.settings.stages import STAGES
from tessera_command.cli import _parser, main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
FEWER = {"--limit 300": "--limit 3", "--max-loss 1": "--max-loss 1 --policy reference"}  # of what takes minutes
TESSERA = re.compile(r"^(?:\.venv/bin/)?tessera (\w+)(.*?)(?: {2,}#.*)?$", re.MULTILINE)


def block(language: str, word: str) -> str:
    """The one block of the README that holds ``word``."""
    (found,) = (text for kind, text in BLOCKS if kind == language and word in text)
    return found


@pytest.fixture
def bash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with the commands of this environment where the README has them."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    tessera = tmp_path / ".venv" / "bin" / "tessera"
    tessera.write_text(f'#!/bin/sh\nexec {sys.executable} -m tessera_command.cli "$@"\n')
    tessera.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/clients:{ROOT}/python_backends")
    monkeypatch.setenv("TESSERA_HEALTH_URL", "http://127.0.0.1:9")
    yield tmp_path


def typed(commands: str) -> str:
    run = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.server
def test_questions_are_asked_as_the_readme_asks_them(
    bash: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_URL", server.grpc_url)
    commands = block("", "tessera sample photos/").replace("localhost:8000", server.http_url)
    for many, few in FEWER.items():
        assert many in commands
        commands = commands.replace(many, few)
    output = typed(commands)
    assert len(list(Path("photos").glob("*.jpg"))) == 12 and len(Path("out.jsonl").read_text().splitlines()) == 12
    assert "\nyes\n" in output and '"text_output":"' in output and '"recall.macro"' in output
    program = block("python", "from tessera_client import Client").replace("localhost:8001", server.grpc_url)
    answers = typed(f"{sys.executable} -c {shlex.quote(program)}").splitlines()
    assert answers[0].startswith("yes Timings(") and len(answers) == 1 + 12  # a description ends without a new line


@pytest.mark.server
def test_a_page_is_parsed_as_the_readme_does(bash: Path, documents: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    serve, *commands = block("", "tessera parse").splitlines()
    assert serve == 'make serve ARGS="--default documents"'
    monkeypatch.setenv("TESSERA_URL", documents.url("grpc"))
    assert "1 page in" in typed("\n".join(commands))
    assert len(Path("out/page.pdf/document.md").read_text()) > 100
    errors = documents.errors()  # the start, stage by stage
    assert all(f"tessera: {stage} loaded in " in errors for stage in STAGES) and "\x1b" not in errors


def test_every_other_command_has_options_that_exist() -> None:
    names = []
    for _, text in BLOCKS:
        for name, words in TESSERA.findall(text):
            arguments = shlex.split(words.replace("DIR", str(ROOT / "build" / "default_model" / "checkpoint")))
            if name == "serve":
                launcher.parse(arguments)
            elif name == "check":
                assert main([name, *arguments]) == 0
            else:
                _parser().parse_args([name, *arguments])
            names.append(name)
    assert set(names) >= {"serve", "ask", "batch", "parse", "plan", "recall", "sample"}
