"""Each wheel alone, with nothing but what it requires: every module of it is imported there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytest.importorskip("tomllib")  # Python 3.11
from wheels import Wheels

IMPORT_ALL = """
import importlib, json, pkgutil, sys
sys.path.insert(0, sys.argv[1])
missing = set()
for package in sys.argv[2:]:
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, package + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                missing.add(error.name)
import tessera_wire
print(json.dumps([tessera_wire.__version__, sorted(missing)]))
"""
# Imported only where it is there: what a GPU's torch brings, and what tritonserver puts before its stages.
OF_ITS_PLACE = {"triton", "triton_python_backend_utils"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Wheels, dict[str, Path]]:
    wheels, folder = Wheels(), tmp_path_factory.mktemp("dist")
    return wheels, {name: wheels.build(name, folder) for name in wheels.table}


def required(wheels: Wheels, wanted: str) -> tuple[set[str], dict[str, Distribution]]:
    """The wheels of the table and the installed distributions that ``wanted`` asks for, and what those ask for."""
    ours, theirs, queue, seen = set(), {}, [Requirement(wanted)], set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if name in wheels.table:
                ours.add(name)
                project = wheels.metadata(name)
                asked = project["optional-dependencies"][extra] if extra else project["dependencies"]
            else:
                theirs[name] = distribution(name)
                asked = theirs[name].requires or []
            parsed = [Requirement(each) for each in asked]
            queue += [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": extra})]
    return ours, theirs


def installed(folder: Path, wheels: Iterator[Path], others: dict[str, Distribution]) -> None:
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(folder)
    for other in others.values():
        for file in other.files or []:
            if file.parts[0] != ".." and "__pycache__" not in file.parts:
                link = folder / file
                link.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(file.locate(), link)  # not a symbolic one: cv2 looks where it really lies
                except OSError:  # another file system
                    shutil.copy(file.locate(), link)


@pytest.mark.parametrize(
    ("wanted", "packages", "may_lack"),
    [
        ("tessera-vlm-wire", ["tessera_wire"], set()),
        ("tessera-vlm-client", ["tessera_client"], {"opentelemetry"}),
        ("tessera-vlm-client[tables]", ["tessera_jobs"], set()),
        ("tessera-vlm-gateway", ["tessera_gateway"], set()),
        ("tessera-vlm-server", ["tessera"], OF_ITS_PLACE),
        ("tessera-vlm[documents]", ["tessera_command", "tessera_documents"], set()),
        ("tessera-vlm[server]", ["tessera_evaluation", "tessera_quantize"], set()),
    ],
)
def test_a_wheel_stands_alone(
    wanted: str, packages: list[str], may_lack: set[str], built: tuple[Wheels, dict[str, Path]], tmp_path: Path
) -> None:
    wheels, files = built
    ours, theirs = required(wheels, wanted)
    installed(tmp_path, (files[name] for name in ours), theirs)
    command = [sys.executable, "-I", "-S", "-c", IMPORT_ALL, str(tmp_path), *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    version, missing = json.loads(done.stdout.splitlines()[-1])
    assert version == wheels.version
    assert set(missing) <= may_lack


def test_each_package_is_in_one_wheel() -> None:
    packages = [package for wheel in Wheels().table.values() for package in wheel["packages"]]
    root = Path(__file__).resolve().parents[2]
    there = [path.parent for folder in ("python_backends", "clients") for path in (root / folder).glob("*/__init__.py")]
    assert sorted(packages) == sorted(path.relative_to(root).as_posix() for path in there)
