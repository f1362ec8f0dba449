"""Forked processes that make what training takes ahead of it, in order, and hand it over in shared memory."""

import mmap
import multiprocessing
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch

Item = tuple[Any, Sequence[np.ndarray]]
"""What is pickled of an item, and its arrays of uint8, which go through shared memory."""


class _Lane(NamedTuple):
    """What one process shares: ``free`` counts the slots of ``memory`` from ``base`` on that it may fill."""

    memory: mmap.mmap
    base: int
    slots: int
    slot_bytes: int
    free: Any
    ready: Any


def _work(make: Callable[[int], Item], first: int, step: int, lane: _Lane) -> None:
    torch.set_num_threads(1)
    parent = os.getppid()
    for turn, number in enumerate(count(first, step)):
        told, arrays = make(number)
        while not lane.free.acquire(timeout=5):
            if os.getppid() != parent:  # it was killed
                return
        at = lane.base + turn % lane.slots * lane.slot_bytes
        end, places = at + lane.slot_bytes, []
        for array in arrays:
            if at + array.nbytes > end:
                raise ValueError(f"item {number} has more than {lane.slot_bytes} bytes; lower --patches")
            lane.memory[at : at + array.nbytes] = array.tobytes()
            places.append((at, array.shape))
            at += array.nbytes
        lane.ready.put((told, places))


class Feed:
    """Items from number ``first`` on; item n comes from process n modulo their number, which may be ``slots`` ahead.

    Forks: start it before CUDA is touched, and before other threads are about.
    """

    def __init__(self, make: Callable[[int], Item], first: int, workers: int, slots: int, slot_bytes: int) -> None:
        context = multiprocessing.get_context("fork")
        cv2.setNumThreads(1)  # a fork has no use for OpenCV's threads, and would wait for them for ever
        memory = mmap.mmap(-1, workers * slots * slot_bytes)  # anonymous and shared: needs no /dev/shm
        self._lanes = [
            _Lane(memory, i * slots * slot_bytes, slots, slot_bytes, context.Semaphore(slots), context.Queue())
            for i in range(workers)
        ]
        self._processes = [
            context.Process(target=_work, args=(make, first + i, workers, lane), daemon=True)
            for i, lane in enumerate(self._lanes)
        ]
        for process in self._processes:
            process.start()
        self._taken = 0

    def next(self) -> Any:
        """The next batch."""
        raise NotImplementedError

    @contextmanager
    def item(self, wait: bool = True) -> Iterator[Item | None]:
        """The next item, whose arrays hold until the context ends; None where it is not made yet, unless ``wait``.

        Raises RuntimeError where its process died.
        """
        index = self._taken % len(self._lanes)
        lane, found = self._lanes[index], None
        while found is None:
            try:
                found = lane.ready.get(wait, timeout=0.5)
            except queue.Empty:
                if not self._processes[index].is_alive():
                    raise RuntimeError("a process that feeds the training has ended; its message says why") from None
                if not wait:
                    yield None
                    return
        told, places = found
        yield told, [np.frombuffer(lane.memory, np.uint8, int(np.prod(s)), at).reshape(s) for at, s in places]
        self._taken += 1
        lane.free.release()

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
