"""The engine in a process of its own, as the stage sees it, so that nobody else's work holds up its interpreter.

The engine's process (`main.py`) steps and nothing else. Requests are taken over, and text is made of their
tokens, here; both speak over a socket. Rows of pictures on a GPU stay in one slab that is allocated here and opened
there once (by CUDA's inter-process handle: opening and closing one for every request stops the GPU's queue each time).
When either process dies, so does the other.
"""

import contextlib
import logging
import queue
import threading
from bisect import bisect_left, insort
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from tessera.engine.process import messages
from tessera.engine.process.messages import Progress, Rows
from tessera.engine.rendering import Answers
from tessera.engine.sequence import Request, TokenEvent
from tessera.errors import ConfigError, TesseraError, Unavailable
from tessera.prompt.tokenizer import Tokenizer
from tessera.settings.stages import EngineConfig

_LOG = logging.getLogger(__name__)
_ALIGNMENT = 512


class EngineProcess:
    """Takes requests and delivers their events.

    A caller that submits or cancels may have to wait until the engine listens. So one thread reads and never sends, and
    another makes text, delivers it, and cancels what a stop string ended. Nobody waits until the engine has taken a
    request: while it steps that takes a millisecond, and the next request would wait as long.

    ``on_death`` is called once, on the thread that reads, when the engine's process has died.
    """

    def __init__(self, folder: Path | str, config: EngineConfig, on_death: Callable[[], None]) -> None:
        """Starts the process and waits until it is ready; raises as Engine.from_checkpoint."""
        self._process, connection = messages.start_process("tessera.engine.process.main")
        self._wire = messages.Wire(connection)
        self._on_death = on_death
        self._stopping = False
        self._rows: dict[int, Rows] = {}  # the pool's, until the engine has ended their request
        try:
            self._pool = EmbeddingPool(torch.device(config.device), config.embedding_pool_bytes)
            slab = None if self._pool.slab is None else reduce_tensor(self._pool.slab)
            self._wire.send(messages.Start(Path(folder), config, slab))
            ready: messages.Ready | TesseraError = self._wire.receive()
        except (EOFError, OSError):
            raise ConfigError("the engine's process ended before it was ready; the server's log says why") from None
        if isinstance(ready, TesseraError):
            self._process.wait()
            raise ready
        self._counts = ready.counts
        self.weights, self.weight_bytes = ready.weights, ready.weight_bytes
        self._answers = Answers(Tokenizer.from_folder(Path(folder)), self.cancel)
        self._progress: queue.SimpleQueue[Progress | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="engine-text", daemon=True)
        self._writer.start()
        self._reader = threading.Thread(target=self._read, name="engine-process", daemon=True)
        self._reader.start()

    def submit(self, request: Request, deliver: Callable[[TokenEvent], None], rows: torch.Tensor | None = None) -> None:
        """Queues a request without ``embeddings``; its ``rows`` may be reused when this returns.

        ``deliver`` gets its events and must be quick. The one with a refusal holds InvalidRequest where the request is
        malformed or can never fit, Unavailable where too many are in flight or the engine is gone.
        """
        self._answers.add(request, deliver)
        message = None
        try:
            if rows is not None:
                message = self._pool.take(rows)
                self._rows[request.number] = message._replace(data=b"")
            self._wire.send(messages.Submit(request, message))
        except OSError:
            self._hear(Progress.refused(request.number, _gone()))
        except Exception:
            _LOG.exception("a request could not be handed to the engine's process")
            self._hear(Progress.refused(request.number, messages.not_taken()))

    def cancel(self, number: int, reason: str = "cancelled") -> None:
        """Ends a request early: its last event, with this reason, follows. Too late does no harm."""
        with contextlib.suppress(OSError):  # its death is noticed elsewhere
            self._wire.send(messages.Cancel(number, reason))

    def cancel_all(self, name: str) -> None:
        """Ends the requests that go by this id or name this lease."""
        for number in self._answers.numbers_of(name):
            self.cancel(number)

    def counts(self) -> dict[str, int]:
        """The engine's counters and gauges as of the call before, and those of the embedding pool."""
        with contextlib.suppress(OSError):
            self._wire.send(messages.Count())
        return self._counts | {
            "embedding_bytes": self._pool.places.used,
            "embedding_bytes_peak": self._pool.places.most_used,
            "embedding_bytes_spilled": self._pool.spilled_bytes,
            "embeddings_on_cpu": self._pool.arrived_on_cpu,
        }

    def stop(self) -> None:
        """Ends all requests with reason "error" and waits for process and threads; no event comes afterwards."""
        self._stopping = True
        with contextlib.suppress(OSError):  # it may be gone already
            self._wire.send(messages.Stop())
        self._reader.join()
        self._progress.put(None)
        self._writer.join()
        self._process.wait()

    def _read(self) -> None:
        try:
            while True:
                self._hear(self._wire.receive())
        except (EOFError, OSError):
            pass
        except Exception:  # whatever it was: nobody would hear of the engine any more, which is as bad as its death
            _LOG.exception("a message of the engine's process could not be understood")
            self._process.kill()
        for number in self._answers.numbers_of():
            self._hear(Progress.refused(number, _gone()))
        if not self._stopping:
            _LOG.error("the engine's process died with exit code %s", self._process.wait())
            self._on_death()

    def _write(self) -> None:
        while True:
            try:
                progress = self._progress.get(timeout=self._answers.wait_s())
            except queue.Empty:
                progress = Progress()
            if progress is None:
                return
            try:
                self._answers.take(progress)
            except Exception:  # without text the stage is as good as dead, and as a dead one it is noticed
                _LOG.exception("what the engine did could not be told")
                self._process.kill()
                return

    def _hear(self, message: Any) -> None:
        if isinstance(message, Progress):
            for end in message.ends:
                if (rows := self._rows.pop(end.number, None)) is not None:
                    self._pool.give_back(rows)
            self._progress.put(message)
        elif isinstance(message, messages.Counts):
            self._counts = message.values
        else:
            raise TypeError(f"{type(message).__name__} is no message for the stage")


def _gone() -> Unavailable:
    return Unavailable("the engine's process is gone; the server restarts")


class EmbeddingPool:
    """Takes over the rows of requests as they arrive, until their requests end.

    ``capacity_bytes``: the slab on the device, allocated at once; rows that find no room in it travel to the engine's
    process and wait in pinned memory there, which the step that needs them reads. May be used from several threads. On
    the CPU there is no slab.
    """

    def __init__(self, device: torch.device, capacity_bytes: int) -> None:
        self.spilled_bytes = 0  # beside the slab now
        self.arrived_on_cpu = 0  # requests whose rows came over the CPU though the engine runs on a GPU
        self.slab: torch.Tensor | None = None  # uint8 [capacity_bytes]
        self.places = Places(capacity_bytes)  # of the slab
        self._lock = threading.Lock()
        if device.type == "cuda":
            self.slab = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
            # Before the engine's steps: the copy is short, and the next request waits for it.
            self._stream = torch.cuda.Stream(device, priority=-1)

    def take(self, rows: torch.Tensor) -> Rows:
        """A copy of ``rows`` [n, hidden], which are complete, as this copy is when it returns: their owner may reuse
        them."""
        if self.slab is None:
            return Rows(None, _bytes_of(rows), rows.dtype, tuple(rows.shape))
        with self._lock:
            place = self.places.take(rows.nbytes)
            self.spilled_bytes += rows.nbytes if place is None else 0
            self.arrived_on_cpu += not rows.is_cuda
        kept = Rows(place, b"", rows.dtype, tuple(rows.shape))
        try:
            with torch.cuda.stream(self._stream):
                if place is None:
                    return kept._replace(data=_bytes_of(rows))
                kept.within(self.slab).copy_(rows, non_blocking=True)
                self._stream.synchronize()
        except BaseException:
            self.give_back(kept)
            raise
        return kept

    def give_back(self, rows: Rows) -> None:
        """No step that was launched needs the rows any more that :meth:`take` returned."""
        if self.slab is None:
            return
        with self._lock:
            if rows.place is None:
                self.spilled_bytes -= rows.nbytes
            else:
                self.places.give_back(rows.place)


def _bytes_of(rows: torch.Tensor) -> bytes:
    return rows.cpu().contiguous().view(torch.uint8).numpy().tobytes()


class Places:
    """Which stretches of ``capacity`` bytes are taken; the first gap that is large enough is used.

    ``used`` bytes are taken now; ``most_used`` is the most that were.
    """

    def __init__(self, capacity: int) -> None:
        self.used = 0
        self.most_used = 0
        self._capacity = capacity
        self._taken: list[tuple[int, int]] = []  # first byte, first byte behind; ascending

    def take(self, size: int) -> int | None:
        """The first of ``size`` bytes that are now taken; None if no gap holds them."""
        size = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        start = 0
        for first, behind in self._taken:
            if first - start >= size:
                break
            start = behind
        if start + size > self._capacity:
            return None
        insort(self._taken, (start, start + size))
        self.used += size
        self.most_used = max(self.most_used, self.used)
        return start

    def give_back(self, start: int) -> None:
        index = bisect_left(self._taken, (start,))
        if index == len(self._taken) or self._taken[index][0] != start:
            raise AssertionError(f"no rows were kept at byte {start}")
        self.used -= self._taken.pop(index)[1] - start
