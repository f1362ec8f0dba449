"""Threads share heaps once the process says so."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

LIMIT = max(2, os.cpu_count() or 1)
THREADS = 8 * LIMIT + 4
SCRIPT = """
import ctypes, os, sys, tempfile, threading
from tessera.tritonserver import gpu_pool as heaps
if sys.argv[1] == "limited":
    heaps.one_per_core()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
here, go_on = threading.Barrier(THREADS + 1), threading.Event()
def work():
    libc.malloc(1000)
    here.wait()
    go_on.wait()
threads = [threading.Thread(target=work) for _ in range(THREADS)]
for thread in threads:
    thread.start()
here.wait()
with tempfile.NamedTemporaryFile("r") as file:
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(file.read().count("<heap nr="))
go_on.set()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="another C library than glibc")
def test_a_process_of_many_threads_keeps_few_heaps():
    def heaps(how):
        script = SCRIPT.replace("THREADS", str(THREADS))
        run = subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert heaps("limited") <= LIMIT < heaps("left alone")
