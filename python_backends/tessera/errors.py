"""The error tree of the server side.

Each error names what was wrong, where, and what to do. The adapters (``tritonserver_model.py``) map
:class:`InvalidRequest` to INVALID_ARGUMENT and :class:`Unavailable` to UNAVAILABLE; everything else is a fault of
ours and becomes INTERNAL without its traceback.

When this process can never use its GPU again.

After some errors (a fault in a kernel, the end of the MPS daemon, an uncorrectable memory error) CUDA answers every
further call of a process with the same error. Such a process must end: as a dead stage it is noticed and restarted,
alive it would answer every request with an error.
"""

from __future__ import annotations

import os


class TesseraError(Exception):
    """Base of all errors raised on purpose by this package."""


class InvalidRequest(TesseraError):
    """The client's request is wrong; the message says which part and how to mend it."""


class Unavailable(TesseraError):
    """The server cannot take this request now; trying again later may work."""


class CheckpointError(TesseraError):
    """A checkpoint folder is missing a file, a weight or a setting, or holds one that is not understood."""


class ConfigError(TesseraError):
    """The server's own configuration is contradictory or out of range."""


def lost_device() -> str | None:
    """CUDA's words if the GPU is lost to this process, None while it works or if none is used.

    Does not wait for what runs on it. To have run out of memory is no loss.
    """
    import torch

    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.current_stream().query()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def end_process_if_lost() -> None:
    """Ends this process, with exit code 1 and a line on standard error (the server's log), if its GPU is lost."""
    if (words := lost_device()) is not None:
        # No logger: what a stage logs travels through the server, and may not arrive before the end.
        os.write(2, f"the GPU is lost to process {os.getpid()}, which ends: {words}\n".encode())
        os._exit(1)
