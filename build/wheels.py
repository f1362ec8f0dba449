"""The wheels of pyproject.toml's [tool.tessera.wheels], into dist/.

    make wheels
    pip install dist/tessera_vlm_wire-*.whl dist/tessera_vlm_client-*.whl

Each is made by hatchling from its row of the table: packages and files of this tree, and requirements whose versions
stand once, in the lists of [project]; wheels of the table require each other in this very version.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import tomllib
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[1]
NAME = re.compile(r"[A-Za-z0-9._-]+")


class Wheels:
    """The table, read. Raises KeyError where a requirement is neither a wheel of it nor in [project]'s lists."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        pyproject = tomllib.loads((root / "pyproject.toml").read_text())
        self._project = pyproject["project"]
        self.table: dict[str, dict[str, Any]] = pyproject["tool"]["tessera"]["wheels"]
        version_file = (root / pyproject["tool"]["hatch"]["version"]["path"]).read_text()
        self.version = re.findall(r'^__version__ = "(.+?)"', version_file, re.MULTILINE)[0]
        lists = [self._project["dependencies"], *self._project["optional-dependencies"].values()]
        self._requirements = {NAME.match(each)[0]: each for one in lists for each in one}  # type: ignore[index]

    def metadata(self, name: str) -> dict[str, Any]:
        """The wheel's own [project]."""
        wheel = self.table[name]
        kept = ("readme", "license", "requires-python")
        return {
            "name": name,
            "version": self.version,
            "description": wheel["description"],
            "dependencies": self._required(wheel["requires"]),
            "optional-dependencies": {extra: self._required(names) for extra, names in wheel.get("extras", {}).items()},
            "scripts": wheel.get("scripts", {}),
            **{key: self._project[key] for key in kept},
        }

    def build(self, name: str, into: Path) -> Path:
        """The wheel's file in the folder ``into``."""
        wheel = self.table[name]
        files = {str(self._root / source): target for source, target in wheel.get("files", {}).items()}
        target = {"packages": wheel["packages"], "force-include": files, "exclude": ["__pycache__"]}
        config = {"project": self.metadata(name), "tool": {"hatch": {"build": {"targets": {"wheel": target}}}}}
        return Path(
            next(WheelBuilder(str(self._root), config=config).build(directory=str(into), versions=["standard"]))
        )

    def _required(self, names: list[str]) -> list[str]:
        return [f"{each}=={self.version}" if each in self.table else self._requirements[each] for each in names]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Builds the wheels of pyproject.toml's [tool.tessera.wheels].")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR")
    into = parser.parse_args().out
    wheels = Wheels()
    for name in wheels.table:
        made = wheels.build(name, into)
        print(f"{made.name}  {made.stat().st_size / 1e6:.2f} MB")
