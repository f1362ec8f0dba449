"""The guard with stand-ins for tritonserver: whatever they do, nothing of them stays. And the sweep at start: what
belongs to nobody goes, what belongs to a living server or to others stays."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.backend import wait_until

from tessera.launcher import guard
from tessera.launcher.installation import STUB
from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Child, Server, command_line

# Deaf to SIGTERM, with a child in a session of its own that nobody waits for: the worst a server leaves.
STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
pathlib.Path(sys.argv[1] + "-" + str(os.getpid())).touch()
time.sleep(600)
"""
# As nvidia-cuda-mps-control -f: makes its socket, starts a server that outlives it, and runs until it is ended.
MPS_CONTROL = """#!{python}
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
assert sys.argv[1:] == ["-f"] and folder == pathlib.Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])
assert "CUDA_VISIBLE_DEVICES" not in os.environ
{first}
(folder / "control").touch()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
(folder / "pids").write_text(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""
# As a stage that shares GPU memory: maps files that are named by its process id, and has another's beside them.
SHARES_MEMORY = """
import mmap, os, pathlib, sys, time
maps = []
for name in (f"torch_{os.getpid()}_123_0", f"cuda.shm.0.{os.getpid():x}.1"):
    path = pathlib.Path("/dev/shm", name)
    path.write_bytes(b"x")
    maps.append(mmap.mmap(os.open(path, os.O_RDWR), 1))
pathlib.Path("/dev/shm", f"torch_{os.getpid()}_another").touch()
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""
ASKS_FOR_MPS = """
import os, pathlib, sys, time
folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "")
found = "shared" if os.path.exists(folder + "/control") else "lost" if folder else "alone"
pathlib.Path(sys.argv[1]).write_text(found + " " + os.environ["CUDA_VISIBLE_DEVICES"])
time.sleep(600)
"""
# Leaves a region, and the folder of broken leases that a language model makes.
QUICK = """
import os, pathlib, sys
pathlib.Path(sys.argv[1]).touch()
os.mkdir(f"/dev/shm/tessera-leases-{os.getpid()}")
sys.exit(3)
"""


class Guarded:
    def __init__(self, code: str, grace_s: float = 0.2, mps_control: Path | None = None):
        self.prefix = f"tessera-test-{uuid.uuid4().hex}"
        job = {
            "command": [sys.executable, "-I", "-S", "-c", code, f"/dev/shm/{self.prefix}"],
            "environment": {**os.environ, "CUDA_VISIBLE_DEVICES": "1"},
            "folder": "/",
            "shm_prefix": self.prefix,
            "grace_s": grace_s,
            "mps_control": mps_control and str(mps_control),
        }
        self.process = Child([sys.executable, "-I", "-S", guard.__file__])
        self.process.tell(json.dumps(job))
        begun = json.loads(self.process.hear())
        self.server, self.mps = begun["pid"], begun["mps"]

    def files(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if name.startswith(self.prefix)]

    def end(self, stop: bool) -> dict[str, object]:
        """The guard's last line, when it was told to stop or has ended by itself."""
        assert stop or self.process.wait(10) == 0
        (line,) = self.process.stop(10)
        assert self.process.status == 0 and self.files() == []
        end: dict[str, object] = json.loads(line)
        return end


def test_a_server_that_will_not_stop_goes_with_its_orphans() -> None:
    running = Guarded(STUBBORN)
    wait_until(lambda: len(running.files()) >= 2, 30)
    pids = guard.descendants(running.process.pid)
    assert running.server in pids and len(pids) >= 2
    end = running.end(stop=True)
    assert end["status"] == signal.SIGKILL
    assert not any(command_line(pid) for pid in pids)


def test_the_end_of_a_server_is_reported_with_its_status() -> None:
    running = Guarded(QUICK)
    end = running.end(stop=False)
    assert end["status"] == 3 << 8  # as waitpid has it: exit code 3
    assert not os.path.exists(f"/dev/shm/tessera-leases-{running.server}")


def mps_control(folder: Path, first: str = "") -> Path:
    program = folder / "mps-control"
    program.write_text(MPS_CONTROL.format(python=sys.executable, first=first))
    program.chmod(0o755)
    return program


def eventually(file: Path) -> str:
    """What the file holds once it holds something."""
    wait_until(lambda: file.exists() and file.read_text(), 30)
    return file.read_text()


@pytest.mark.parametrize("who_ends", ["the server", "its daemon"])
def test_an_mps_daemon_is_there_before_the_server_and_neither_outlives_the_other(tmp_path: Path, who_ends: str) -> None:
    running = Guarded(ASKS_FOR_MPS, mps_control=mps_control(tmp_path), grace_s=60.0 * (who_ends == "its daemon"))
    assert eventually(Path(f"/dev/shm/{running.prefix}")) == "shared 1" and running.mps
    pids = [int(pid) for pid in eventually(Path(f"/dev/shm/{running.prefix}mps/pids")).split()]
    assert len(pids) == 2 and all(command_line(pid) for pid in pids)
    if who_ends == "its daemon":
        guard.kill(pids[0])
        assert running.end(stop=False)["why"] == "its MPS daemon ended"
    else:
        assert running.end(stop=True)["why"] is None
    assert not any(command_line(pid) for pid in (*pids, running.server))


@pytest.mark.parametrize("first", ["sys.exit(1)", None])
def test_without_a_working_mps_daemon_the_server_runs_alone(tmp_path: Path, first: str | None) -> None:
    running = Guarded(ASKS_FOR_MPS, mps_control=mps_control(tmp_path, first) if first else tmp_path / "nowhere")
    assert eventually(Path(f"/dev/shm/{running.prefix}")) == "alone 1" and not running.mps
    assert running.end(stop=True)["why"] is None


def shared_by(pid: int) -> set[str]:
    return {f"/dev/shm/torch_{pid}_123_0", f"/dev/shm/cuda.shm.0.{pid:x}.1"}


def test_what_cuda_keeps_for_shared_tensors_goes_too() -> None:
    running = Guarded(SHARES_MEMORY)
    pid = int(eventually(Path(f"/dev/shm/{running.prefix}")))
    another = Path(f"/dev/shm/torch_{pid}_another")  # named alike by another container
    try:
        assert all(map(os.path.exists, shared_by(pid)))
        running.end(stop=True)
        assert not any(map(os.path.exists, shared_by(pid)))
        assert another.exists()
    finally:
        another.unlink()


def test_shared_tensors_of_a_process_that_ended_early_are_remembered(tmp_path: Path) -> None:
    job = {"command": [], "environment": {}, "folder": "/", "shm_prefix": "x", "grace_s": 0.0, "mps_control": None}
    watching = guard.Guard(job)
    with subprocess.Popen([sys.executable, "-c", SHARES_MEMORY, str(tmp_path / "pid")]) as child:
        eventually(tmp_path / "pid")
        watching.look()
        child.kill()
    try:
        assert watching.cuda_files >= shared_by(child.pid)
        assert set(guard.remove_files(shared_by(child.pid) | {"/dev/shm/gone"})) == shared_by(child.pid)
    finally:
        Path(f"/dev/shm/torch_{child.pid}_another").unlink()


def test_a_job_that_never_came_is_no_start() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", guard.__file__], input=b"", capture_output=True, timeout=10)
    assert done.returncode == 1 and b"before the job was read" in done.stderr


@pytest.fixture
def prefix() -> Iterator[str]:
    """The prefix of a server whose guard is alive: its lock is held until the test lets go."""
    made = f"tessera-{uuid.uuid4().hex[:12]}-"
    yield made
    for path in Path("/dev/shm").glob(f"*{made}*"):
        path.unlink()


def test_a_living_guard_keeps_its_own_and_a_dead_one_loses_all(prefix: str) -> None:
    lock = guard.take_lock(prefix)
    folder = tempfile.mkdtemp(prefix=Path(guard.ENVIRONMENTS).name.rstrip("*"), dir="/tmp")
    os.pwrite(lock, folder.encode(), 0)
    region, other = Path(f"/dev/shm/{prefix}{uuid.uuid4()}"), Path(f"/dev/shm/{prefix[:-1]}x-{prefix}")
    region.touch()
    other.touch()
    blocked = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", region.name])
    try:
        assert guard.remove_if_gone(prefix) == [] and region.exists() and blocked.poll() is None
        assert os.path.isdir(folder)
        os.close(lock)  # what the kernel does when a process ends
        removed = guard.remove_if_gone(prefix)
        assert removed in ([str(region), folder], [])  # []: another server of this machine started in this moment
        assert blocked.wait(10) == -9
        assert (
            other.exists()
            and not region.exists()
            and not os.path.exists(folder)
            and not os.path.exists(guard.lock_path(prefix))
        )
    finally:
        blocked.kill()
        blocked.wait()


def test_the_sweep_takes_only_names_of_our_form(prefix: str, tmp_path: Path) -> None:
    """Of locks, and of the folder that one names."""
    lock = guard.take_lock(prefix)
    os.pwrite(lock, str(tmp_path).encode(), 0)
    os.close(lock)
    strange = Path("/dev/shm/.tessera-strange-lock")
    strange.touch()
    try:
        guard.sweep()
        assert strange.exists() and tmp_path.is_dir() and not os.path.exists(guard.lock_path(prefix))
    finally:
        strange.unlink()


def test_the_stub_that_is_only_tried_is_no_stage(tmp_path: Path) -> None:
    """As the Python backend does before it loads a model, without arguments."""
    server = Server(ServerOptions(tmp_path))
    server.pid = os.getpid()
    reads = {"executable": "/bin/cat", "stdin": subprocess.PIPE}
    with (
        subprocess.Popen([STUB], **reads) as trial,
        subprocess.Popen([STUB, "-", "/dev/null", "/dev/null"], **reads) as stage,
    ):
        wait_until(lambda: command_line(trial.pid) == [STUB] and len(command_line(stage.pid)) == 4)
        found = server.stub_pids()  # other tests' servers' too
        assert found["/dev/null"] == stage.pid and trial.pid not in found.values()
