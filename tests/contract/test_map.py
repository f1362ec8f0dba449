"""The map in CONTRIBUTING.md names every room there is, and none that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAP = (ROOT / "CONTRIBUTING.md").read_text().partition("## The map")[2].partition("## Words")[0]
ROWS = {ROOT / path: text for path, text in re.findall(r"^\| `([^`]+)` \| (.*) \|$", MAP, re.MULTILINE)}


def rooms() -> list[Path]:
    """Packages, what lies beside them in `tessera`, and folders of scripts."""
    packages = [
        file.parent for source in ("python_backends", "clients") for file in (ROOT / source).rglob("__init__.py")
    ]
    modules = (ROOT / "python_backends" / "tessera").glob("[!_]*.py")
    scripts = {file.parent for folder in ("build", "loadtest") for file in (ROOT / folder).glob("*/*.py")}
    return [*packages, *modules, *scripts]


def test_every_room_is_named() -> None:
    """By a row of its own, or in the row of the folder that it is in."""
    names = {room: f"`{room.name}`" if room.suffix else f"`{room.name}/`" for room in rooms()}
    assert [room for room, name in names.items() if room not in ROWS and name not in ROWS.get(room.parent, "")] == []


def test_what_is_named_is_there() -> None:
    assert len(ROWS) > 10 and [path for path in ROWS if not path.exists()] == []
    named = [(path, name) for path, text in ROWS.items() for name in re.findall(r"`([\w/]+(?:\.py|/))`", text)]
    assert len(named) > 20
    assert [(path, name) for path, name in named if not any((path if path.is_dir() else path.parent).rglob(name))] == []


def test_no_page_holds_both_sides_of_a_merge() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert [page for page in pages if re.search("^(<<<<<<<|>>>>>>>) ", page.read_text(), re.MULTILINE)] == []
