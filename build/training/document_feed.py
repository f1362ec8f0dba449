"""Processes that make batches ahead of the training, in order: batch n comes from process n modulo their number."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import queue
import threading
from typing import Any

import cv2
import numpy as np
import torch
from document_batches import Chunk, Plan, batch
from document_tokens import ChatTokens
from trainer import hand_over

SLOT_BYTES = 160 << 20
SLOTS = 2
"""Batches that a process may be ahead by."""


def _make(first: int, step: int, plan: Plan, memory: mmap.mmap, base: int, free: Any, ready: Any) -> None:
    """One process: patches into its shared slots, the rest of a chunk through its queue."""
    torch.set_num_threads(1)
    tokens, number, slot, parent = ChatTokens(), first, 0, os.getppid()
    while True:
        made = batch(number, plan, tokens)
        while not free.acquire(timeout=5):
            if os.getppid() != parent:  # it was killed
                return
        begin = base + slot * SLOT_BYTES
        told = []
        at = begin
        for chunk in made:
            patches = chunk.arrays.pop("patches")
            if at + patches.nbytes > begin + SLOT_BYTES:
                raise ValueError(f"batch {number} has more than {SLOT_BYTES} bytes of patches; lower Plan.patches")
            memory[at : at + patches.nbytes] = patches.tobytes()
            told.append((chunk, at, patches.shape))
            at += patches.nbytes
        ready.put((number, told))
        number, slot = number + step, (slot + 1) % SLOTS


class Feed:
    """Batches from number ``first`` on, on the device. Start it before CUDA is touched: it forks."""

    def __init__(self, plan: Plan, first: int, workers: int, device: torch.device) -> None:
        context = multiprocessing.get_context("fork")
        cv2.setNumThreads(1)  # a fork has no use for OpenCV's threads, and would wait for them for ever
        self._memory = mmap.mmap(-1, workers * SLOTS * SLOT_BYTES)  # anonymous and shared: needs no /dev/shm
        self._device = device
        self._free = [context.Semaphore(SLOTS) for _ in range(workers)]
        self._ready = [context.Queue() for _ in range(workers)]
        self._processes = [
            context.Process(
                target=_make,
                args=(first + i, workers, plan, self._memory, i * SLOTS * SLOT_BYTES, self._free[i], self._ready[i]),
                daemon=True,
            )
            for i in range(workers)
        ]
        for process in self._processes:
            process.start()
        self._ahead: queue.Queue[list[Batch] | None] = queue.Queue(maxsize=2)
        self._stop = threading.Event()
        self._first = first
        self._thread: threading.Thread | None = None

    def _fetch(self) -> None:
        """Copies what comes to the device, one batch after the other."""
        number = self._first
        stream = torch.cuda.Stream() if self._device.type == "cuda" else None
        while not self._stop.is_set():
            worker = (number - self._first) % len(self._processes)
            try:
                found, told = self._ready[worker].get(timeout=0.5)
            except queue.Empty:
                if not self._processes[worker].is_alive():
                    self._ahead.put(None)
                    return
                continue
            assert found == number, (found, number)
            chunks = []
            for chunk, at, shape in told:
                count = int(np.prod(shape))
                patches = np.frombuffer(self._memory, np.uint8, count, at).reshape(shape)
                chunks.append(Batch(chunk, patches, self._device, stream))
            if stream is not None:
                stream.synchronize()
            self._free[worker].release()
            hand_over(self._ahead, chunks, self._stop)
            number += 1

    def next(self) -> list[Batch]:
        """The next batch. Raises RuntimeError where a process died."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._fetch, daemon=True)
            self._thread.start()
        found = self._ahead.get()
        if found is None:
            raise RuntimeError("a process that makes batches has ended; its own message says why")
        return found

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for process in self._processes:
            process.terminate()


class Batch:
    """A chunk's arrays as tensors on the device, copied."""

    def __init__(
        self, chunk: Chunk, patches: np.ndarray, device: torch.device, stream: torch.cuda.Stream | None = None
    ) -> None:
        self.layout, self.answered = chunk.layout, chunk.answered
        self.patch_count = int(chunk.arrays["lengths"].sum())
        self.full = len(chunk.arrays["lengths"]) * patches.shape[1] == self.patch_count
        self.longest_answer = int(chunk.arrays["nth"].max()) + 1
        held = {name: torch.from_numpy(array) for name, array in {**chunk.arrays, "patches": patches}.items()}
        with torch.cuda.stream(stream):  # beside the training's own, or a copy would wait for all that is queued there
            self.tensors = {name: array.to(device, copy=True) for name, array in held.items()}
        if stream is not None:
            for tensor in self.tensors.values():
                tensor.record_stream(torch.cuda.default_stream())
