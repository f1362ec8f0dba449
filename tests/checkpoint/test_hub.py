"""A model named as on the Hugging Face hub, found in a cache laid out as huggingface_hub lays it out."""

from pathlib import Path

import pytest

from tessera.checkpoint.files import find_checkpoint
from tessera.errors import CheckpointError
from tessera.launcher.cli import serve_main
from tessera.tritonserver.settings import StageSettings

COMMITS = ("0" * 40, "1" * 40)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """HF_HOME with two snapshots of Org/Name, of which refs/main names the second."""
    model = tmp_path / "home" / "hub" / "models--Org--Name-1.5B"
    for commit in COMMITS:
        (model / "snapshots" / commit).mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMITS[1])
    return tmp_path / "home"


def test_the_snapshot_of_main_is_taken_where_huggingface_hub_keeps_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home.parent))
    (home.parent / ".cache").mkdir()
    (home.parent / ".cache" / "huggingface").symlink_to(home)
    snapshot = home / "hub" / "models--Org--Name-1.5B" / "snapshots" / COMMITS[1]
    for environment in (
        {},
        {"XDG_CACHE_HOME": str(home.parent / ".cache")},
        {"HF_HOME": str(home)},
        {"HF_HUB_CACHE": str(home / "hub"), "HF_HOME": "/elsewhere"},
        {"HUGGINGFACE_HUB_CACHE": str(home / "hub")},
    ):
        assert find_checkpoint("Org/Name-1.5B", environment).resolve() == snapshot
    hub = pytest.importorskip("huggingface_hub")
    (snapshot / "config.json").write_text("{}")
    theirs = hub.snapshot_download("Org/Name-1.5B", cache_dir=home / "hub", local_files_only=True)
    assert Path(theirs) == snapshot


def test_a_folder_of_that_name_goes_first(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Org" / "Name-1.5B").mkdir(parents=True)
    assert find_checkpoint("Org/Name-1.5B", {"HF_HOME": str(home)}) == Path("Org/Name-1.5B")


@pytest.mark.parametrize("damage", ["models--Org--Name-1.5B/refs/main", None])
def test_what_is_not_there_is_told_how_to_fetch(home: Path, damage: str | None) -> None:
    named = "Org/Name-1.5B" if damage else "Org/Other"
    if damage:
        (home / "hub" / damage).unlink()
    with pytest.raises(CheckpointError, match=rf"cache .*/home/hub has no model .*: fetch it by `hf download {named}`"):
        find_checkpoint(named, {"HF_HOME": str(home)})


@pytest.mark.parametrize("named", ["nosuch", "../Name", "/nosuch/folder", "a/b/c"])
def test_a_path_is_no_name(named: str) -> None:
    with pytest.raises(CheckpointError, match=f"^there is no checkpoint folder {named}$"):
        find_checkpoint(Path(named), {})


def test_serve_and_check_take_a_name(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(home))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    flags = ["--device", "cpu", "--checkpoint"]
    assert serve_main(["--check", *flags, "Org/Name-1.5B"]) == 1
    assert f"snapshots/{COMMITS[1]} has no config.json" in capsys.readouterr().err
    assert serve_main([*flags, "Org/Nosuch"]) == 1
    assert "fetch it by `hf download Org/Nosuch`" in capsys.readouterr().err
    monkeypatch.setenv("TESSERA_CHECKPOINT", "Org/Name-1.5B")
    assert serve_main(["--check", "--device", "cpu"]) == 1
    assert f"snapshots/{COMMITS[1]} has no config.json" in capsys.readouterr().err
    monkeypatch.setenv("TESSERA_CHECKPOINT", "Org/Nosuch")
    assert serve_main(["--device", "cpu"]) == 1
    assert "fetch it by `hf download Org/Nosuch`" in capsys.readouterr().err


def test_the_stages_take_a_name(home: Path) -> None:
    args = {"model_config": "{}", "model_name": "preprocess", "model_repository": str(home / "models" / "preprocess")}
    for named, found in (("Org/Name-1.5B", f"snapshots/{COMMITS[1]}"), ("Org/Nosuch", None), ("../nosuch", None)):
        settings = StageSettings(args, {"TESSERA_CHECKPOINT": named, "HF_HOME": str(home)})
        if found is not None:
            assert str(settings.checkpoint).endswith(found)
        else:
            with pytest.raises(CheckpointError, match="there is no checkpoint folder"):
                _ = settings.checkpoint
