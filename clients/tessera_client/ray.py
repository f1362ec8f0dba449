"""Ray Data asks a Tessera server (docs/clusters.md): :class:`Ask`, for ``Dataset.map_batches``.

::

    from ray.data import ActorPoolStrategy
    from tessera_client.ray import Ask

    answered = dataset.map_batches(
        Ask,
        fn_constructor_args=("server:8001",),
        fn_constructor_kwargs={"max_tokens": 5},
        batch_format="pyarrow",
        batch_size=64,
        compute=ActorPoolStrategy(size=2),
        num_cpus=0.2,
    )

Nothing of Ray is imported here: it calls the class with tables of pyarrow, which comes with Ray Data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tessera_client.client import Client
from tessera_client.retry import Retry
from tessera_wire.errors import ConnectionFailed, InvalidRequest, TesseraClientError, Unavailable

if TYPE_CHECKING:
    import pyarrow as pa

RESULTS = ("answer", "finish_reason", "error")
Row = tuple[str | None, str | None, str | None]  # those three
PARTS = ("deadline", "cancelled")  # finish reasons of answers that are not whole


class ServerAway(Exception):
    """No server takes requests: the batch should be asked again, later.

    ``dataset.context.retried_map_errors = ["ServerAway"]`` and ``max_map_retries = 20`` have Ray do so.
    """


class Ask:
    """Asks the question of each row about its picture.

    A batch, a table of pyarrow, comes back with three more columns of text: ``answer`` or ``error``, of which one is
    null, and ``finish_reason``, null where nothing was answered. A row whose picture or question is wrong, or that the
    server fails on, is a row with an error; where no server is there at the end of a row's time, ServerAway is raised.

    Args:
        url: the server or servers, as :class:`~tessera_client.Client` takes them.
        image: the column of pictures: encoded bytes, paths (that this worker can read), ``data:`` URLs, lists of
            these, or null for a question without a picture.
        prompt: the column of questions.
        concurrency: how many of a batch are asked at a time.
        timeout: seconds for a row, waiting for a server that is away included.
        options: as for :meth:`~tessera_client.Client.ask`; the same for all rows.
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        image: str = "image",
        prompt: str = "prompt",
        concurrency: int = 16,
        timeout: float = 120.0,
        **options: Any,
    ) -> None:
        self._client = Client(url, timeout=timeout, retry=Retry(attempts=1))
        self._columns = image, prompt
        self._options = {"concurrency": concurrency, **options}

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The batch with the three columns. Raises ServerAway, or ValueError for a table that cannot be asked."""
        import pyarrow as pa

        if not isinstance(batch, pa.Table):
            raise ValueError(f"a batch must be a table, not a {type(batch).__name__}: batch_format='pyarrow'")
        missing = [name for name in self._columns if name not in batch.column_names]
        doubled = [name for name in RESULTS if name in batch.column_names]
        if missing or doubled:
            wrong = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(doubled)} already"
            raise ValueError(f"the table {wrong}; its columns are {', '.join(batch.column_names)}")
        rows = self._answers(zip(*(batch[name].to_pylist() for name in self._columns)))
        for name, values in zip(RESULTS, zip(*rows) if rows else ((), (), ())):
            batch = batch.append_column(name, pa.array(values, pa.string()))
        return batch

    def _answers(self, items: Any) -> list[Row]:
        rows: list[Row] = []
        suspicious = False
        for result in self._client.ask_many(items, errors="return", **self._options):
            if isinstance(result, (Unavailable, ConnectionFailed)):
                raise ServerAway(str(result))
            if isinstance(result, TesseraClientError):
                rows.append((None, None, str(result)))
                suspicious |= not isinstance(result, InvalidRequest)
            elif result.finish_reason in PARTS:
                rows.append((None, result.finish_reason, "the answer is not whole"))
                suspicious = True
            else:
                rows.append((result.text, result.finish_reason, None))
        if suspicious:
            self._look()
        return rows

    def _look(self) -> None:
        """Whether the server is in order, so that what failed was the row's own fault. Raises ServerAway."""
        try:
            self._client.ask(None, "Hello", max_tokens=1)
        except TesseraClientError as error:
            raise ServerAway(str(error)) from error
