"""Finding a tritonserver and laying out the wheel's files, on made-up installations."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera.launcher import installation
from tessera.launcher.installation import (
    LIBRARY,
    STUB,
    InstallationError,
    check_numpy,
    find_installation,
    installation_from_wheel,
    installation_on_path,
    python_version,
    wheel_package,
    with_longer_stub_timeout,
)


def make_wheel(folder: Path, stubs: tuple[str, ...]) -> Path:
    """A package folder with the layout of nvidia-pytriton."""
    server = folder / "pytriton" / "tritonserver"
    for path in ("bin/tritonserver", "backends/python/libtriton_python.so", "caches/local/libtritoncache.so"):
        (server / path).parent.mkdir(parents=True, exist_ok=True)
        (server / path).write_text(path)
    for version in stubs:
        (server / "python_backend_stubs" / version).mkdir(parents=True)
        (server / "python_backend_stubs" / version / STUB).write_text(f"stub for {version}")
    (folder / "nvidia_pytriton.libs").mkdir()
    return folder / "pytriton"


def test_the_wheel_is_laid_out_with_the_stub_of_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = make_wheel(tmp_path / "site", ("3.8", python_version()))
    found = installation_from_wheel(package, "9.9", tmp_path / "runtime")
    python = found.root / "backends" / "python"
    assert (python / STUB).read_text() == f"stub for {python_version()}"
    assert (python / LIBRARY).is_file() and not (python / LIBRARY).is_symlink()
    assert (found.root / "caches" / "local" / "libtritoncache.so").is_file()
    assert (found.root / "bin" / "tritonserver").read_text() == "bin/tritonserver"
    assert found.library_path[0] == package.parent / "nvidia_pytriton.libs"
    # what the stub's folder gets written into it must not land in the package
    (python / "__pycache__").mkdir()
    assert not (package / "tritonserver" / "backends" / "python" / "__pycache__").exists()
    # a library that could not run from the new folder stays where it is
    monkeypatch.setattr(installation.os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    found = installation_from_wheel(package, "9.9", tmp_path / "mounted")
    assert (found.root / "backends" / "python" / LIBRARY).is_symlink()


def test_the_wheel_in_use_waits_one_second_in_two_places() -> None:
    """To send a message to a stage's process, and to get one from it."""
    package = wheel_package()
    assert package is not None
    before = (package / "tritonserver" / "backends" / "python" / LIBRARY).read_bytes()
    after = with_longer_stub_timeout(before)
    assert len(after) == len(before) and sum(a != b for a, b in zip(after, before)) in range(2, 17)


def test_what_a_wheel_lacks_is_named(tmp_path: Path) -> None:
    package = make_wheel(tmp_path / "old", ("3.8", "3.9"))
    with pytest.raises(InstallationError, match=rf"no Python stub for Python {python_version()} .* 3.8, 3.9"):
        installation_from_wheel(package, "9.9", tmp_path / "runtime")
    package = make_wheel(tmp_path / "cut", (python_version(),))
    (package / "tritonserver" / "bin" / "tritonserver").unlink()
    with pytest.raises(InstallationError, match="incomplete: no .*bin/tritonserver"):
        installation_from_wheel(package, "9.9", tmp_path / "runtime")


def test_no_server_at_all_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(installation, "wheel_package", lambda: None)
    with pytest.raises(InstallationError, match="pip install --no-deps nvidia-pytriton"):
        find_installation(tmp_path)


def test_numpy_two_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation.importlib.metadata, "version", lambda name: "1.26.4")
    check_numpy()
    monkeypatch.setattr(installation.importlib.metadata, "version", lambda name: "10.1")
    with pytest.raises(InstallationError, match="numpy 10.1 is installed .* install numpy 1.26.4"):
        check_numpy()


def test_a_server_on_path_comes_first_and_its_stub_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "opt"
    for path in ("bin/tritonserver", f"backends/python/{STUB}"):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text(f"\x7fELF libpython{python_version()}.so.1.0\0")
    os.chmod(root / "bin" / "tritonserver", 0o755)
    monkeypatch.setenv("PATH", str(root / "bin"))
    found = find_installation(tmp_path / "runtime")
    assert found.root == root and found.library_path == ()
    assert not (tmp_path / "runtime").exists()

    (root / "backends" / "python" / STUB).write_text("\x7fELF libpython3.4.so.1.0\0")
    with pytest.raises(InstallationError, match=rf"built for Python 3.4, but this is Python {python_version()}"):
        installation_on_path(root / "bin" / "tritonserver")
