"""Each wheel alone, with nothing but what it requires: every module of it is imported there."""

import json
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytest.importorskip("tomllib")  # Python 3.11
from wheels import Wheels

# Imports all modules of the packages from the folders; of what is installed, only the files of these distributions are
# there.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
from importlib.machinery import PathFinder
from importlib.metadata import distribution
folders, site, packages, distributions = json.loads(sys.argv[1])
sys.path += [*folders, site]
there = {str(file.locate()) for name in distributions for file in distribution(name).files or []}
class Wall:
    def find_spec(self, module, path=None, target=None):
        spec = PathFinder.find_spec(module, path)
        if spec and spec.origin and spec.origin.startswith(site) and spec.origin not in there:
            raise ModuleNotFoundError(f"no module named {module}", name=module)
sys.meta_path.insert(0, Wall())
missing = set()
for package in packages:
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, package + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                missing.add(error.name.partition(".")[0])
import tessera_wire
print(json.dumps([tessera_wire.__version__, sorted(missing)]))
"""
# Imported only where it is there: what a GPU's torch brings, and what tritonserver puts before its stages.
OF_ITS_PLACE = {"triton", "triton_python_backend_utils"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Wheels, dict[str, Path]]:
    """The table, and a folder of each wheel's contents."""
    wheels, folder = Wheels(), tmp_path_factory.mktemp("dist")
    for name in wheels.table:
        zipfile.ZipFile(wheels.build(name, folder)).extractall(folder / name)
    return wheels, {name: folder / name for name in wheels.table}


def required(wheels: Wheels, wanted: str) -> tuple[set[str], set[str]]:
    """The wheels of the table and the installed distributions that ``wanted`` asks for, and what those ask for."""
    seen: set[tuple[str, str]] = set()
    queue = [Requirement(wanted)]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if name in wheels.table:
                project = wheels.metadata(name)
                asked = project["optional-dependencies"][extra] if extra else project["dependencies"]
            else:
                asked = distribution(name).requires or []
            parsed = [Requirement(each) for each in asked]
            queue += [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": extra})]
    names = {name for name, _ in seen}
    return names & set(wheels.table), names - set(wheels.table)


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
    wanted: str, packages: list[str], may_lack: set[str], built: tuple[Wheels, dict[str, Path]]
) -> None:
    wheels, contents = built
    ours, theirs = required(wheels, wanted)
    given = json.dumps(
        [[str(contents[name]) for name in ours], sysconfig.get_path("purelib"), packages, sorted(theirs)]
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", IMPORT_ALL, given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    version, missing = json.loads(done.stdout.splitlines()[-1])
    assert version == wheels.version
    assert set(missing) <= may_lack


def test_each_package_is_in_one_wheel() -> None:
    packages = [package for wheel in Wheels().table.values() for package in wheel["packages"]]
    root = Path(__file__).resolve().parents[2]
    there = [path.parent for folder in ("python_backends", "clients") for path in (root / folder).glob("*/__init__.py")]
    assert sorted(packages) == sorted(path.relative_to(root).as_posix() for path in there)
