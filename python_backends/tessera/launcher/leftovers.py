"""What a server leaves when launcher and guard are both killed: found at the next start by its lock, and removed.

Each guard holds a lock file beside its server's shared memory for as long as it lives; the kernel lets go of the lock
with the process. A lock that can be taken therefore belongs to a server whose guard is gone, whichever container it
ran in: process ids would not tell that where several containers share /dev/shm.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil

from tessera.launcher import guard

LOCK = re.compile(r"\.(tessera-[0-9a-f]{12}-)lock")
ENVIRONMENT = re.compile(re.escape(guard.ENVIRONMENTS.rstrip("*")) + r"\w+")


def sweep() -> list[str]:
    """Ends and removes what is left of all servers of ours whose guard is gone; returns the removed paths."""
    removed = []
    for name in os.listdir("/dev/shm"):
        if match := LOCK.fullmatch(name):
            removed += remove_if_gone(match.group(1))
    return removed


def remove_if_gone(prefix: str) -> list[str]:
    """The processes, regions and temporary folder of the server started with ``prefix``, unless its guard lives."""
    path = guard.lock_path(prefix)
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # removed by its own guard meanwhile, or another user's
        return []
    try:
        if os.fstat(lock).st_uid != os.getuid():
            return []
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kill_stragglers(prefix)
        removed = guard.remove_shared_memory(prefix)
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
    for pid in guard.processes():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid != os.getuid() or pid == os.getpid():
                continue
            with open(f"/proc/{pid}/cmdline", "rb") as arguments, open(f"/proc/{pid}/environ", "rb") as environment:
                if prefix.encode() in arguments.read() + environment.read():
                    guard.kill(pid)
