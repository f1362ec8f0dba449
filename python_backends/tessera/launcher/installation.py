"""Where tritonserver is, and what it needs to run with this Python interpreter.

Two sources: a ``tritonserver`` on PATH (NVIDIA's container), else the PyPI wheel nvidia-pytriton, which carries the
binary, the Python backend and one stub per Python version, but not in the layout that the binary expects.

How long tritonserver waits for the process of a stage before it takes it for dead: ten seconds, not one.

Release 24.10's Python backend waits one second, which nothing sets. A process that lives but did not run for so long,
on an overloaded or paused machine, has its requests answered by an error and their memory freed; when it goes on, it
and the server read that memory, and the server crashes. So the backend's library is used with that timeout made longer.
A process that is really dead the launcher notices by itself.
"""

import ctypes.util
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tessera.errors import TesseraError

STUB = "triton_python_backend_stub"


class InstallationError(TesseraError):
    """No usable tritonserver; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Installation:
    """A tritonserver that can be started: ``root`` has bin/, backends/ and, for most, caches/.

    ``library_path`` goes in front of LD_LIBRARY_PATH.
    """

    root: Path
    library_path: tuple[Path, ...] = ()


def find_installation(runtime: Path) -> Installation:
    """The tritonserver on PATH, else the wheel's, laid out in the new folder ``runtime``. Raises InstallationError."""
    on_path = shutil.which("tritonserver")
    if on_path:
        return installation_on_path(Path(on_path))
    package = wheel_package()
    if package is None:
        raise InstallationError(
            "no tritonserver: none on PATH, and the package nvidia-pytriton is not installed for "
            f"{sys.executable}; install it (pip install --no-deps nvidia-pytriton==0.7.0) or use NVIDIA's container"
        )
    return installation_from_wheel(package, importlib.metadata.version("nvidia-pytriton"), runtime)


def python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def wheel_package() -> Path | None:
    """Folder of the package ``pytriton``, found without importing it (its imports may fail under --no-deps)."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def installation_on_path(binary: Path) -> Installation:
    """An installed server: its folders are where it expects them; only the stub's Python must be ours."""
    root = binary.resolve().parent.parent
    stub = root / "backends" / "python" / STUB
    built_for = stub_python(stub) if stub.is_file() else None
    if built_for and built_for != python_version():
        raise InstallationError(
            f"the Python stub of {binary} is built for Python {built_for}, but this is Python {python_version()} "
            f"({sys.executable}); run tessera with Python {built_for}"
        )
    # Release 24.10 is server 2.51; later stubs were not tried with numpy 2, so only this one is refused.
    if os.environ.get("TRITON_SERVER_VERSION", "").startswith("2.51"):
        check_numpy()
    return Installation(root)


def stub_python(stub: Path) -> str | None:
    """The Python version X.Y a stub is linked against, read from the file; None if it does not say."""
    found = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    return found.group(1).decode() if found else None


def installation_from_wheel(package: Path, version: str, runtime: Path) -> Installation:
    """Lays the wheel's files out in ``runtime`` as the binary expects them. Raises InstallationError."""
    server = package / "tritonserver"
    stub = server / "python_backend_stubs" / python_version() / STUB
    if not stub.is_file():
        there = sorted(path.parent.name for path in server.glob(f"python_backend_stubs/*/{STUB}"))
        raise InstallationError(
            f"nvidia-pytriton {version} has no Python stub for Python {python_version()} ({sys.executable}); it has "
            f"stubs for Python {', '.join(there) or '(none)'}: run tessera with one of those"
        )
    libraries = package.parent / "nvidia_pytriton.libs"
    for needed in (server / "bin" / "tritonserver", server / "backends" / "python", libraries):
        if not needed.exists():
            raise InstallationError(f"nvidia-pytriton {version} is incomplete: no {needed}; reinstall it")
    check_numpy()
    library_path = (libraries, *libpython_folder())
    link_runtime(runtime, server, stub)  # last: nothing is left behind where something is missing
    return Installation(runtime, library_path)


def link_runtime(folder: Path, server: Path, stub: Path) -> None:
    """Symlinks, but for a library: the stub must lie among the Python backend's files, and that folder be writable."""
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    for name in ("bin", "caches"):
        (folder / name).symlink_to(server / name)
    runs_from_here = not os.statvfs(backend).f_flag & os.ST_NOEXEC  # in a container of Docker's it would not
    for path in (*(server / "backends" / "python").iterdir(), stub):
        if path.name == LIBRARY and runs_from_here:
            (backend / path.name).write_bytes(with_longer_stub_timeout(path.read_bytes()))
        elif path.name != "__pycache__":
            (backend / path.name).symlink_to(path)


def libpython_folder() -> tuple[Path, ...]:
    """Folder of this interpreter's shared library, which the stub is linked against; () if the system has it."""
    name = f"libpython{python_version()}.so.1.0"
    for folder in (Path(sysconfig.get_config_var("LIBDIR") or sys.base_prefix), Path(sys.base_prefix) / "lib"):
        if (folder / name).is_file():
            return (folder,)
    # The 3.13 stub of the wheel brings its own copy.
    if sys.version_info >= (3, 13) or ctypes.util.find_library(f"python{python_version()}"):
        return ()
    raise InstallationError(
        f"{name} was not found: the server's Python stub needs an interpreter with a shared library "
        f"(built with --enable-shared), and {sys.executable} has none; install libpython{python_version()} or "
        "use another build of Python"
    )


def check_numpy() -> None:
    """This server's stub reads numpy 1's dtype layout: with numpy 2 it dies at the first BYTES tensor."""
    try:
        version = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        raise InstallationError(f"numpy is not installed for {sys.executable}; install numpy 1.26") from None
    if int(version.split(".")[0]) >= 2:
        raise InstallationError(
            f"numpy {version} is installed for {sys.executable}, but tritonserver 2.51's Python stub crashes on text "
            "tensors with numpy 2; install numpy 1.26.4 there (or make a small environment that holds it and a .pth "
            "file to this one's packages)"
        )


LIBRARY = "libtriton_python.so"
STUB_TIMEOUT_S = 10
JULIAN_DAY_OF_1970 = 2_440_588


def with_longer_stub_timeout(library: bytes) -> bytes:
    """The library with :data:`STUB_TIMEOUT_S`; the same bytes if it is of another build, which has no such second."""
    return library.replace(_wait(1), _wait(STUB_TIMEOUT_S))


def _wait(seconds: int) -> bytes:
    """The number in the machine code that makes a deadline for the system, in microseconds since 1970, of the time now
    as boost counts it, from Julian day 0: the wait less the days between the two."""
    return ((seconds - JULIAN_DAY_OF_1970 * 86_400) * 1_000_000).to_bytes(8, "little", signed=True)


if __name__ == "__main__":  # of an installation itself, when an image is made
    path = Path(sys.argv[1])
    path.write_bytes(with_longer_stub_timeout(path.read_bytes()))
