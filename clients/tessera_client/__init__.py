"""The client of a Tessera server: questions about pictures, answered by a vision-language model.

::

    from tessera_client import Client

    with Client("localhost:8001") as client:
        print(client.ask("room.jpg", "Is there an exposed wire?").text)

:class:`Client` for threads, :class:`AsyncClient` for asyncio, the command ``tessera`` for the shell. Importing this
package imports neither tritonclient nor numpy; they come with the first gRPC client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tessera_client.client import Client
from tessera_client.messages import (
    Answer,
    Cascade,
    Delta,
    LabelScore,
    Models,
    ModelStatus,
    PicturePlan,
    PictureView,
    ServedModel,
    ServerStatus,
    Timings,
    Usage,
)
from tessera_client.retry import Retry
from tessera_client.streaming import Stream
from tessera_wire.errors import (
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    ProtocolError,
    ServerError,
    TesseraClientError,
    Unavailable,
)

if TYPE_CHECKING:
    from tessera_client.aio import AsyncClient, AsyncStream

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Cascade",
    "Client",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Delta",
    "InvalidRequest",
    "LabelScore",
    "ModelStatus",
    "Models",
    "PicturePlan",
    "PictureView",
    "ProtocolError",
    "Retry",
    "ServedModel",
    "ServerError",
    "ServerStatus",
    "Stream",
    "TesseraClientError",
    "Timings",
    "Unavailable",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name in ("AsyncClient", "AsyncStream"):  # load asyncio
        from tessera_client import aio

        return getattr(aio, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
