"""The process between the launcher and tritonserver: it outlives the launcher just long enough to clean up.

Run as a file by a bare interpreter (standard library only, nothing of ours imported). One JSON line on standard
input says what to run; the end of standard input means "stop", whether the launcher closed it or was killed. The
word "kill" before the end means: at once, for a server whose requests hang.

Why a process of its own: tritonserver forks its Python stubs, and a stub whose server is gone lives on for seconds,
or for good if it is blocked. As their *subreaper* the guard inherits every such orphan, so it can end exactly its
own and never has to match by name. It has one thread, so the kernel's parent-death signal, which follows the thread
that spawned the child, is safe to use here: if the guard itself is killed, tritonserver goes too.

What a server leaves when launcher and guard are both killed: found at the next start by its lock, and removed.

Each guard holds a lock file beside its server's shared memory for as long as it lives; the kernel lets go of the lock
with the process. A lock that can be taken therefore belongs to a server whose guard is gone, whichever container it
ran in: process ids would not tell that where several containers share /dev/shm.
"""

import contextlib
import ctypes
import fcntl
import glob
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

MPS_START_S = 2.0
LOOK_INTERVAL_S = 2.0

# tritonserver makes one such folder a run, under this fixed name, and removes it only when it exits by itself.
ENVIRONMENTS = "/tmp/python_env_*"


class Guard:
    """Runs one server; ``run`` returns when the server and everything it started are gone."""

    def __init__(self, job: dict[str, Any]):
        self.command = job["command"]
        self.environment = job["environment"]
        self.folder = job["folder"]
        self.shm_prefix = job["shm_prefix"]
        self.grace_s = job["grace_s"]
        self.mps_control = job["mps_control"]
        self.mps_folder = f"/dev/shm/{self.shm_prefix}mps"
        self.launcher = os.getppid()
        self.server = self.mps = 0
        self.cuda_files: set[str] = set()
        self.status: int | None = None
        self.why: str | None = None
        self.temporary: str | None = None
        self.told_to_stop = False
        self.lock = -1
        self.wake, self.waker = os.pipe()
        self.libc = ctypes.CDLL(None, use_errno=True)

    def run(self) -> None:
        """Starts the server, waits for its end or for the order to stop, and cleans up."""
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.set_blocking(self.waker, False)
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.stop_soon)
        try:
            self.lock = take_lock(self.shm_prefix)
            if self.mps_control:
                self.start_mps()
            with start_lock():
                before = set(glob.glob(ENVIRONMENTS))
                self.server = self.spawn(self.command, self.environment)
                tell({"pid": self.server, "mps": self.mps > 0})
                self.wait_for_environment(before)
            while self.status is None and not self.told_to_stop:
                self.look()
                self.wait(LOOK_INTERVAL_S)
            if self.status is None:
                self.stop()
        finally:
            self.kill_everything()
            remove_shared_memory(self.shm_prefix)
            remove_files(self.cuda_files)
            shutil.rmtree(f"/dev/shm/tessera-leases-{self.server}", ignore_errors=True)  # tritonserver/leases.py
            if self.temporary:
                shutil.rmtree(self.temporary, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(lock_path(self.shm_prefix))
        tell({"status": self.status, "why": self.why})

    def stop_soon(self, *_: object) -> None:
        self.told_to_stop = True

    def spawn(self, command: list[str], environment: dict[str, str]) -> int:
        """Starts a child that goes when we go, in a session of its own; returns its process id."""
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            preexec_fn=lambda: self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
        process.returncode = 0  # reaped here, not by Popen
        return process.pid

    def start_mps(self) -> None:
        """Starts the daemon through which the server's processes share the GPU, and waits for its socket.

        It is this server's own and ends with it, so that a new start finds nothing of what killed processes left in
        it. Where it does not start, the processes take turns on the GPU.
        """
        os.mkdir(self.mps_folder, 0o700)
        places = {"CUDA_MPS_PIPE_DIRECTORY": self.mps_folder, "CUDA_MPS_LOG_DIRECTORY": self.mps_folder}
        environment = {**self.environment, **places}
        # It offers all GPUs: clients of one that is limited to some would have to number these again, from 0.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        try:
            self.mps = self.spawn([self.mps_control, "-f"], environment)
            deadline = time.monotonic() + MPS_START_S
            while not os.path.exists(f"{self.mps_folder}/control"):
                if os.waitpid(self.mps, os.WNOHANG)[0] or time.monotonic() > deadline:
                    kill(self.mps)
                    raise OSError("it made no socket")
                time.sleep(0.02)
            self.environment |= places
        except OSError as error:
            self.mps = 0
            os.write(2, f"tessera: no MPS daemon ({error}); the stages take turns on the GPU\n".encode())

    def wait_for_environment(self, before: set[str]) -> None:
        """Notices the server's temporary folder: the only new one, while no other start can be under way."""
        deadline = time.monotonic() + 2.0
        while self.status is None and not self.told_to_stop and time.monotonic() < deadline:
            self.wait(0.02)
            new = [path for path in set(glob.glob(ENVIRONMENTS)) - before if os.stat(path).st_uid == os.getuid()]
            if new:
                # Two mean that a server was started by hand at the same moment: neither is surely ours.
                self.temporary = new[0] if len(new) == 1 else None
                os.pwrite(self.lock, (self.temporary or "").encode(), 0)
                return

    def wait(self, seconds: float) -> None:
        """Sleeps until something happens: a child ended, standard input closed, a signal, or the time is up."""
        watched = [self.wake] if self.told_to_stop else [self.wake, 0]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self.wake in ready:
            os.read(self.wake, 512)
        if 0 in ready:
            order = os.read(0, 512)
            if b"kill" in order:
                self.grace_s = 0.0
            if not order or b"kill" in order:
                self.told_to_stop = True
        # A fork of the launcher may hold the pipe open; a changed parent shows its death all the same.
        if os.getppid() != self.launcher:
            self.told_to_stop = True
        self.reap()

    def reap(self) -> bool:
        """Collects ended children, adopted ones too. Returns False once none is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self.server:
                    self.status = status
                if pid == self.mps and self.status is None and not self.told_to_stop:  # all on the GPU is lost
                    self.why, self.told_to_stop, self.grace_s = "its MPS daemon ended", True, 0.0
        except ChildProcessError:
            return False

    def look(self) -> None:
        """Remembers the files in shared memory that CUDA and torch keep for tensors which our descendants share.

        A killed process leaves them. They are named by process ids, which are not unique where containers share
        /dev/shm: so what counts is that the process has the file mapped.
        """
        for pid in descendants(os.getpid()):
            named = glob.glob(f"/dev/shm/torch_{pid}_*") + glob.glob(f"/dev/shm/cuda.shm.*.{pid:x}.*")
            if named:
                with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
                    mapped = file.read()
                    self.cuda_files.update(path for path in named if path.encode() in mapped)

    def stop(self) -> None:
        """Asks the server to end and gives it ``grace_s``: it waits for open connections, some for ever."""
        if not self.grace_s:
            return
        self.look()
        os.kill(self.server, signal.SIGTERM)
        deadline = time.monotonic() + self.grace_s
        while self.status is None and time.monotonic() < deadline:
            self.wait(0.2)

    def kill_everything(self) -> None:
        """SIGKILL to all our descendants until none is left."""
        self.look()
        deadline = time.monotonic() + 2.0
        while self.reap() and time.monotonic() < deadline:
            for pid in descendants(os.getpid()):
                kill(pid)
            time.sleep(0.01)


@contextlib.contextmanager
def start_lock() -> Iterator[None]:
    """Held while the temporary folder of a starting server is still unknown; a lock on /tmp leaves no file."""
    folder = os.open(os.path.dirname(ENVIRONMENTS), os.O_RDONLY)
    deadline = time.monotonic() + 5.0  # guards hold it for 2 s at most; anybody else may hold it for ever
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.02)
        yield
    finally:
        os.close(folder)


def lock_path(prefix: str) -> str:
    """The file whose lock says that the guard of the server with this prefix lives."""
    return f"/dev/shm/.{prefix}lock"


def take_lock(prefix: str) -> int:
    """Makes the lock file and holds its lock; complete when it appears, so that no sweep finds it unlocked."""
    path = lock_path(prefix)
    lock = os.open(path + "-new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(path + "-new", path)
    return lock


def processes() -> dict[int, int]:
    """Process id -> its parent's, of every process that /proc shows."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{entry}/stat", "rb") as file:
                found[int(entry)] = int(file.read().rpartition(b")")[2].split()[1])
    return found


def descendants(root: int) -> list[int]:
    """All processes below ``root``."""
    children: dict[int, list[int]] = {}
    for pid, parent in processes().items():
        children.setdefault(parent, []).append(pid)
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def remove_shared_memory(prefix: str) -> list[str]:
    """Removes the regions of the server that was started with ``prefix``, and our folders; returns the regions'."""
    paths = set(glob.glob("/dev/shm/" + glob.escape(prefix) + "*"))
    folders = set(filter(os.path.isdir, paths))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return remove_files(paths - folders)


def remove_files(paths: set[str]) -> list[str]:
    """Removes those that are still there; returns their paths."""
    removed = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):
            os.unlink(path)
            removed.append(path)
    return removed


def tell(message: dict[str, Any]) -> None:
    """One JSON line to the launcher, which may be gone."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(message).encode() + b"\n")


def read_job() -> dict[str, Any]:
    with open(0, "rb", buffering=0, closefd=False) as orders:  # unbuffered, so that it takes no more than the line
        line = orders.readline()
    if not line:
        raise SystemExit("guard: standard input ended before the job was read")
    job: dict[str, Any] = json.loads(line)
    return job


LOCK = re.compile(r"\.(tessera-[0-9a-f]{12}-)lock")
ENVIRONMENT = re.compile(re.escape(ENVIRONMENTS.rstrip("*")) + r"\w+")


def sweep() -> list[str]:
    """Ends and removes what is left of all servers of ours whose guard is gone; returns the removed paths."""
    removed = []
    for name in os.listdir("/dev/shm"):
        if match := LOCK.fullmatch(name):
            removed += remove_if_gone(match.group(1))
    return removed


def remove_if_gone(prefix: str) -> list[str]:
    """The processes, regions and temporary folder of the server started with ``prefix``, unless its guard lives."""
    path = lock_path(prefix)
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # removed by its own guard meanwhile, or another user's
        return []
    try:
        if os.fstat(lock).st_uid != os.getuid():
            return []
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kill_stragglers(prefix)
        removed = remove_shared_memory(prefix)
        folder = os.pread(lock, 4096, 0).decode("utf-8", "replace")
        if ENVIRONMENT.fullmatch(folder) and os.path.isdir(folder):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return removed
    except BlockingIOError:
        return []
    finally:
        os.close(lock)


def kill_stragglers(prefix: str) -> None:
    """SIGKILL to our processes that name a server's regions in their arguments (stubs that were blocked live on) or
    its MPS sockets in their environment."""
    for pid in processes():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid != os.getuid() or pid == os.getpid():
                continue
            with open(f"/proc/{pid}/cmdline", "rb") as arguments, open(f"/proc/{pid}/environ", "rb") as environment:
                if prefix.encode() in arguments.read() + environment.read():
                    kill(pid)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Guard(read_job()).run()
