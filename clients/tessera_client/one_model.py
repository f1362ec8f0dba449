"""One model for a whole job, whichever servers answer and however often they start again: :class:`OneModel`."""

from __future__ import annotations

import asyncio

from tessera_client.aio import AsyncClient
from tessera_client.messages import ServedModel
from tessera_wire.errors import ConnectionFailed, InvalidRequest, ProtocolError, TesseraClientError, Unavailable


class OtherModel(InvalidRequest):
    """A server has another model than the job's others."""


class OneModel:
    """Knows which servers have the job's model. A server that may have started again is asked again.

    Args:
        client: that does not retry; of all the job's servers.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client.untraced()
        self._served: ServedModel | None = None
        self._known: dict[str, asyncio.Task[None]] = {}

    async def begin(self) -> ServedModel:
        """What the servers in order have. Raises OtherModel where they differ, and where none answers its error."""
        last: TesseraClientError | None = None
        for server in self._client.servers:
            try:
                await self.check(server)
            except (ConnectionFailed, Unavailable) as error:
                last = error
        if self._served is None:
            raise last or ConnectionFailed("there is no server")
        return self._served

    def doubt(self) -> None:
        """A request failed: any server may have started again, and with another model."""
        self._known.clear()

    async def check(self, server: str) -> None:
        """To be awaited after an answer from ``server``. Raises OtherModel, and what the server fails with."""
        asked = self._known.get(server)
        if asked is None or (asked.done() and (asked.cancelled() or asked.exception() is not None)):
            asked = self._known[server] = asyncio.ensure_future(self._ask(server))
        await asyncio.shield(asked)

    async def _ask(self, server: str) -> None:
        try:
            served = await (self._client.only(server) if server else self._client).served()
        except (InvalidRequest, ProtocolError) as error:
            words = f"{server or self._client.url} does not say which model it serves: {error.message}"
            raise ProtocolError(words, "start it with this client's version of Tessera") from error
        if self._served is None:
            self._served = served
        elif served != self._served:
            words = f"{server or self._client.url} serves another model ({described(served)}) than this job has been"
            raise OtherModel(f"{words} asking ({described(self._served)})", "give it servers of one model")


def described(served: ServedModel) -> str:
    """For messages."""
    return f"{served.model_type}, checkpoint {served.checkpoint[:8]}"
