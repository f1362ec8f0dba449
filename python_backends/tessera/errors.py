"""The error tree of the server side.

Each error names what was wrong, where, and what to do. The adapters (``tritonserver_model.py``) map
:class:`InvalidRequest` to INVALID_ARGUMENT and :class:`Unavailable` to UNAVAILABLE; everything else is a fault of
ours and becomes INTERNAL without its traceback.
"""

from __future__ import annotations


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
