"""The engine's own process: serves one stage (`client.py`) until it says stop or is gone."""

import gc
import logging
import os
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from tessera import heaps
from tessera.engine.engine import Engine
from tessera.engine.process import messages
from tessera.engine.process.messages import Progress
from tessera.engine.structured_output.compiling import GrammarLane
from tessera.errors import TesseraError, end_process_if_lost

_LOG = logging.getLogger(__name__)
# So soon the thread that steps gets the interpreter back from the one that listens; Python's 5 ms are a step.
SWITCH_S = 0.0005
# How many new objects make Python look for garbage, 700 by default: then it takes 2 ms in every fourth step of 130
# answers, mostly while the device waits for the next one, and looks through lists of tokens that are in use.
GARBAGE = 10_000
_IDLE_SECONDS = 5.0


class EngineServer:
    """Listens on a thread of its own and, on the caller's, steps while there is work.

    A step that raises ends the requests it may have seen with reason "error"; those that come after are served. If it
    cost the GPU, the process ends.
    """

    def __init__(self, wire: messages.Wire, engine: Engine, slab: torch.Tensor | None) -> None:
        self._wire = wire
        self._engine = engine
        self._slab = slab
        self._wake = threading.Event()
        self._stopping = False
        self._grammars = GrammarLane(engine.constraints, self._take, self._tell)

    def serve(self) -> None:
        """Returns after the stage's Stop; nothing is told afterwards."""
        threading.Thread(target=self._listen, name="listen", daemon=True).start()
        checked = False
        while not self._stopping:
            self._wake.clear()  # before looking, so that whatever comes later wakes us
            if self._engine.has_work():
                self._tell(self._step())
                checked = False
            elif not self._wake.wait(None if checked else _IDLE_SECONDS):
                self._check_books()
                checked = True
        self._tell(self._engine.close("the language model is stopping"))
        self._slab = None  # CUDA tells the stage that nobody reads it any more

    def _listen(self) -> None:
        try:
            while not isinstance(message := self._wire.receive(), messages.Stop):
                self._hear(message)
        except (EOFError, OSError):
            os._exit(0)  # the stage is gone: nobody waits for anything, least of all for a step
        except Exception:  # an engine that hears nothing any more is as good as dead
            _LOG.exception("a message of the stage could not be understood")
            logging.shutdown()
            os._exit(1)
        self._stopping = True
        self._wake.set()

    def _step(self) -> Progress:
        try:
            return self._engine.step()
        except Exception:
            _LOG.exception("a step of the language model failed")
            end_process_if_lost()
            return self._engine.fail_all("a step failed; the server's log says why")

    def _check_books(self) -> None:
        """Idle is the time to look for leaked blocks; books found wrong are begun again."""
        try:
            self._engine.scheduler.check()
        except AssertionError:
            _LOG.exception("the books of the key/value cache were wrong and are begun again")
            self._tell(self._engine.fail_all("the key/value cache had to be cleared"))

    def _hear(self, message: Any) -> None:
        if isinstance(message, messages.Submit):
            if self._engine.constraints.has(message.request.sampling):
                self._take(message)
                return
            try:
                self._grammars.put(message)
            except TesseraError as error:
                self._tell(Progress.refused(message.request.number, error))
        elif isinstance(message, messages.Cancel):
            if not self._grammars.cancel(message.number, message.reason):
                self._engine.cancel(message.number, message.reason)
                self._wake.set()
        elif isinstance(message, messages.Count):
            self._wire.send(messages.Counts(self._engine.metrics.snapshot()))
        else:
            _LOG.error("%s is no message for the engine", type(message).__name__)

    def _take(self, message: messages.Submit) -> None:
        try:
            rows = None if message.rows is None else self._opened(message.rows)
            self._engine.submit(replace(message.request, embeddings=rows))
            self._wake.set()
        except TesseraError as error:
            self._tell(Progress.refused(message.request.number, error))
        except Exception:
            _LOG.exception("a request could not be taken")
            self._tell(Progress.refused(message.request.number, messages.not_taken()))

    def _opened(self, rows: messages.Rows) -> torch.Tensor:
        if rows.place is not None:
            assert self._slab is not None
            return rows.within(self._slab)
        data = torch.frombuffer(bytearray(rows.data), dtype=torch.uint8)
        return rows.within(data if self._slab is None else data.pin_memory())

    def _tell(self, progress: Progress) -> None:
        if progress:
            self._wire.send(progress)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="language_model: %(message)s")
    sys.setswitchinterval(SWITCH_S)
    wire = messages.Wire(Connection(int(sys.argv[1])))
    try:
        start: messages.Start = wire.receive()
        try:
            engine = Engine.from_checkpoint(start.folder, start.config)
        except TesseraError as error:
            wire.send(error)
            return
        gc.collect()
        heaps.keep_freed()  # on a CPU a step's tensors take as many pages as a picture
        gc.set_threshold(GARBAGE)
        gc.freeze()  # else what start-up made is looked through now and then, and steps wait 100 ms for that
        slab = None if start.slab is None else start.slab[0](*start.slab[1])
        wire.send(messages.Ready(engine.metrics.snapshot(), engine.weights, engine.weight_bytes))
        EngineServer(wire, engine, slab).serve()
    except (EOFError, OSError):
        pass  # the stage is gone
    # Whatever else still runs (a step that waits for a GPU) must not keep the process.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
