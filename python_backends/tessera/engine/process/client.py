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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from tessera.engine.drafts.text import with_draft
from tessera.engine.process import messages
from tessera.engine.process.embedding_pool import EmbeddingPool
from tessera.engine.process.messages import Progress, Rows
from tessera.engine.rendering import Answers
from tessera.engine.sequence import Request, TokenEvent
from tessera.errors import ConfigError, TesseraError, Unavailable
from tessera.prompt.tokenizer import Tokenizer
from tessera.settings.stages import EngineConfig

_LOG = logging.getLogger(__name__)


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
        self._drafts, self._tokenizer = bool(config.drafts), Tokenizer.from_folder(Path(folder))
        self._answers = Answers(self._tokenizer, self.cancel)
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
            if self._drafts:  # here, for the tokenizer lets no other thread of its process work
                request = with_draft(request, self._tokenizer)
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
