"""The registry: every name has a program that explains itself, here, where there is no GPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import bench
import pytest


@pytest.mark.parametrize("name", bench.PROGRAMS)
def test_a_program_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 0
    assert (
        f"usage: {name}" in capsys.readouterr().out and import_module(bench.PROGRAMS[name][0].partition(":")[0]).__doc__
    )


@pytest.mark.parametrize("given", [[], ["no_such_bench"]])
def test_other_names_are_answered_by_the_list(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", *given])
    assert bench.main() == 2
    assert all(f"  {name} " in capsys.readouterr().err for name in ["load"])


def test_every_file_with_a_main_is_in_the_registry() -> None:
    folder = Path(bench.__file__).parent
    programs = {f"bench.{file.stem}" for file in folder.glob("[!_]*.py") if "\ndef main(" in file.read_text()}
    assert programs == {module for module, _ in bench.PROGRAMS.values() if ":" not in module} - {"load"}
