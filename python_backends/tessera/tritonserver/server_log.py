"""This package's log lines in the server's own log."""

from __future__ import annotations

import logging

from tessera.tritonserver.speaking import SPEAKING


class ServerLog(logging.Handler):
    """Hands records to the Python backend's logger, by level."""

    def emit(self, record: logging.LogRecord) -> None:
        import triton_python_backend_utils as pb_utils

        write = {"CRITICAL": "log_error", "ERROR": "log_error", "WARNING": "log_warn"}.get(record.levelname, "log_info")
        with SPEAKING:
            getattr(pb_utils.Logger, write)(self.format(record))


def write_to_server_log(stage: str) -> None:
    """From now on everything that ``tessera`` logs, from INFO on, appears in the server's log as the stage's."""
    handler = ServerLog()
    handler.setFormatter(logging.Formatter(f"{stage}: %(message)s"))
    logger = logging.getLogger("tessera")
    logger.setLevel(logging.INFO)
    logger.handlers = [handler]
    logger.propagate = False
