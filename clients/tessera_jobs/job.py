"""A job: the rows of a source that have no result yet, asked; see the package for the data's way.

And what it will cost, from some of its rows: how the server cuts their pictures, and how fast it answers them. They are
asked as the job will ask them, as many at a time, and their answers are thrown away: a rate that was not measured
would be a guess.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np

from tessera_client import Answer, AsyncClient, Retry, ServedModel
from tessera_jobs.asker import Asker, Call, described, for_each, run_job
from tessera_jobs.journal import Journal, rewrite
from tessera_jobs.resume_index import ResumeIndex, changed_rows, contents, half
from tessera_jobs.rows import Row, Source
from tessera_wire.errors import ConnectionFailed, InvalidRequest, TesseraClientError, Unavailable

AHEAD = 64  # rows that are read at a time
FILES = 8  # threads that read pictures
SYNC_S = 1.0
REPORT_S = 0.1
LONGEST_ERROR = 400  # characters


@dataclass(slots=True)
class Tally:
    """What became of the rows.

    ``kept`` were over before this run, of which ``answered`` and ``failed`` are; ``same`` of the answered took another
    row's answer. ``errors``: rows of all the results that have no answer. ``pictures``: of this run's rows.
    ``seconds``: of asking alone. ``cascades``: answers of cascades, of which ``escalated`` are the full cut's.
    """

    rows: int = 0
    kept: int = 0
    answered: int = 0
    failed: int = 0
    same: int = 0
    errors: int = 0
    pictures: int = 0
    seconds: float = 0.0
    first_error: str = ""
    cascades: int = 0
    escalated: int = 0

    def speed(self, seconds: float) -> str:
        """How fast this run's rows were, in pictures where they have any."""
        count, what = (self.pictures, "pictures") if self.pictures else (self.answered + self.failed, "rows")
        return f"{count / max(seconds, 1e-9):.1f} {what}/s"


@dataclass
class Job:
    """Rows into ``out``: a .jsonl that grows, or a .parquet that is written at the end and has its journal beside it
    until then.

    url: of one server or several, as for :class:`tessera_client.Client`. timeout: seconds a request may take.
    concurrency: rows under way at a time. in_order: results as the source has its rows, not as they came. again: asks
    rows again that failed in an earlier run. patience: seconds that all servers may be away, at the start too. force:
    asks rows again whose result came from another model, or whose pictures have changed. notice: called with what the
    user should know at once. progress: called with the number of rows that are over, of all rows, and how fast they go.
    """

    source: Source
    out: Path
    url: str
    timeout: float | None
    concurrency: int
    in_order: bool
    again: bool
    patience: float
    force: bool
    notice: Callable[[str], None]
    progress: Callable[[int, int, str], None] = lambda done, total, rate: None

    def __post_init__(self) -> None:
        out = self.out
        self._table: Any = None
        if out.suffix == ".parquet":
            import tessera_jobs.table as table  # says now that pyarrow is missing, not after the last row

            self._table = table
        elif out.suffix != ".jsonl":
            raise InvalidRequest(f"results cannot be written as {out.name}", "let it end in .jsonl or .parquet")
        if out.resolve() == self.source.path.resolve():
            raise InvalidRequest(f"{out} is where the rows come from", "give another -o")
        self.journal = out.with_name(f"{out.name}.jsonl") if self._table else out
        """Where the results are until all rows are over."""
        self.tally = Tally()
        self.pool = uuid.uuid4().hex

    def run(self) -> Tally:
        """Asks what has no result yet.

        Raises InvalidRequest for a source of no rows and for results of another job, another model or other pictures,
        ConnectionFailed or Unavailable where servers stay away, OSError where results cannot be written; what is over
        then stays, and the next run goes on from there.
        """
        self._take_up()
        with closing(Journal(self.journal)) as self._lines:
            self._index = ResumeIndex(self.source, self._lines)
            if self.again and self._index.errors:
                self._drop(lambda place, result: result["error"] is not None)
            run_job(self._go_on())
            self._lines.sync()
            self._finish()
        return self.tally

    def _take_up(self) -> None:
        """What an earlier run left becomes the journal that this one goes on with."""
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        if self._table and self.out.exists() and not self.journal.exists():
            rewrite(self.journal, self._table.read_table(self.out))

    def _finish(self) -> None:
        places = self._index.places
        moved = self.in_order and bool((places[1:] < places[:-1]).any())
        results = map(self._lines.at, places.tolist()) if moved else (result for _, result in self._lines.placed())
        if self._table:
            self._table.write_table(results, self.out, self._index.id_type)
            self.journal.unlink()
        elif moved:
            rewrite(self.journal, results)

    async def _go_on(self) -> None:
        """Asks the rows that have no result, after a look at those that have one."""
        async with self.client() as client:
            self._asker = Asker(client, self.patience, one_model=True)
            served: ServedModel | None = None
            try:
                if (self._index.places < 0).any():
                    await self._asker.begin(self.notice)
                served = await self._asker.model()
            except (ConnectionFailed, Unavailable):
                if (self._index.places < 0).any():
                    raise
                # Else nothing is to be asked.
            self._hold_against(served)
            index, tally = self._index, self.tally
            tally.rows, tally.errors, tally.kept = len(index.places), index.errors, int((index.places >= 0).sum())
            if tally.kept < tally.rows:
                await self._ask_all()

    def client(self) -> AsyncClient:
        """One that leaves trying again to the :class:`Asker`."""
        return AsyncClient(self.url, timeout=self.timeout, retry=Retry(attempts=1))

    def _hold_against(self, served: ServedModel | None) -> None:
        """Drops the results of other models and pictures where that is wanted. Raises InvalidRequest where not."""
        changed, force = changed_rows(self._index, self._lines), self.force
        counts, found, others = self._index.checkpoints, [], 0
        unknown = counts[b""]
        if served is not None:
            self._checkpoint = served.checkpoint[:16]
            if others := counts.total() - unknown - counts[self._checkpoint.encode()]:
                found.append(f"{others} of its rows were asked of another model than {described(served)}")
        if changed:
            name = self._lines.at(changed[0])["id"]
            found.append(f"the pictures of {len(changed)} of its rows have changed since, the first {name!r:.80}")
        if found and not force:
            remedy = "--force asks these rows again; or give another -o"
            raise InvalidRequest(f"{self.out} holds other results: {'; '.join(found)}", remedy)
        if unknown and not force:
            words = f"{unknown} rows of {self.out} do not say which model or which pictures they are of"
            self.notice(f"{words} (an earlier version's): they are kept; --force asks them again")
        if force and served is None and (found or unknown):
            raise Unavailable("no server is there to ask again", "start one")
        dropped, of_others = {*self._index.mended, *changed}, force and bool(others or unknown)
        if dropped or of_others:
            self._drop(
                lambda place, result: place in dropped or (of_others and result.get("checkpoint") != self._checkpoint)
            )

    def _drop(self, unwanted: Callable[[int, dict[str, Any]], bool]) -> None:
        """Lets results go, of which it is told where they begin."""
        self._lines.rewrite(result for place, result in self._lines.placed() if not unwanted(place, result))
        self._index.match(self._lines)

    async def _ask_all(self) -> None:
        self._under_way: dict[str, asyncio.Future[None]] = {}
        self._reported = self._synced = self._started = time.monotonic()
        self.progress(self.tally.kept, self.tally.rows, "")
        with ThreadPoolExecutor(FILES, "tessera-pictures") as self._files:
            await for_each(self._read_ahead(), self._work, self.concurrency)
        self.tally.seconds = time.monotonic() - self._started

    async def _read_ahead(self) -> AsyncGenerator[Row, None]:
        loop, rows = asyncio.get_running_loop(), self._index.rows(self._index.places < 0)
        while some := await loop.run_in_executor(self._files, list, islice(rows, AHEAD)):
            for row in some:
                yield row

    async def _work(self, row: Row) -> None:
        loop = asyncio.get_running_loop()
        content = ""
        try:
            reading = loop.run_in_executor(self._files, contents, row) if row.images or row.messages else None
            pictures, content = await reading if reading else contents(row)
            call = question(row, pictures, self.pool)
            if row.unseeded:
                self._write(row, to_record(await self._asker.ask(call)), content)
            else:
                await self._answer_once(row, content, call)
        except TesseraClientError as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            self._write(row, {"answer": None, "error": reason[:LONGEST_ERROR]}, content)
        if time.monotonic() > self._synced + SYNC_S:
            self._synced = time.monotonic()
            await loop.run_in_executor(self._files, self._lines.sync)

    async def _answer_once(self, row: Row, content: str, call: Call) -> None:
        """Takes the answer to the same question about the same pictures where there is one."""
        while other := self._under_way.get(content):
            await asyncio.wait([other])
        if (place := self._index.answers.get(half(content))) is not None:
            kept = self._lines.at(place)
            if kept["content"] == content:
                fields = ("answer", "error", "finish_reason", "choices", "logprobs", "cascade", "fingerprint")
                same = {name: kept[name] for name in fields if name in kept}
                self._write(row, {**same, "same_as": kept["id"]}, content)
                return
        self._under_way[content] = over = asyncio.get_running_loop().create_future()
        try:
            answer = await self._asker.ask(call)
            self._index.answers.put(half(content), self._write(row, to_record(answer), content))
        finally:
            del self._under_way[content]
            over.set_result(None)

    def _write(self, row: Row, result: dict[str, Any], content: str = "") -> int:
        digests = {"asked": f"{row.asked:016x}"} | ({"content": content} if content else {})
        digests |= ({"stat": f"{row.stat:016x}"} if row.stat else {}) | {"checkpoint": self._checkpoint}
        place = self._index.places[row.number] = self._lines.append({"id": row.id, **result, **digests})
        tally = self.tally
        tally.pictures += len(row.images)
        if "same_as" in result:
            tally.same += 1
        elif "cascade" in result:
            tally.cascades += 1
            tally.escalated += result["cascade"]["escalated"]
        if result["error"] is None:
            tally.answered += 1
        else:
            tally.failed += 1
            tally.errors += 1
            tally.first_error = tally.first_error or f"{row.id}: {result['error']}"
        over = tally.kept + tally.answered + tally.failed
        if (now := time.monotonic()) > self._reported + REPORT_S or over == tally.rows:
            self._reported = now
            self.progress(over, tally.rows, tally.speed(now - self._started))
        return place


def question(row: Row, pictures: list[bytes], pool: str) -> Call:
    """What asks it; answers of one ``pool`` may be drafts of one another."""
    options = {"draft_pool": pool, **row.options}

    def call(client: AsyncClient) -> Awaitable[Answer]:
        if row.messages is not None:
            return client.chat(row.messages, **options)
        return client.ask(pictures, row.question, **options)

    return call


def to_record(answer: Answer) -> dict[str, Any]:
    """An answer as the fields of a result."""
    result: dict[str, Any] = {"answer": answer.text, "error": None, "finish_reason": answer.finish_reason}
    if answer.usage is not None:
        result |= {
            f"{name}_tokens": getattr(answer.usage, f"{name}_tokens") for name in ("prompt", "image", "completion")
        }
    if answer.choices is not None:
        result["choices"] = [asdict(score) for score in answer.choices]
    if answer.logprobs is not None:
        result["logprobs"] = answer.logprobs
    if answer.cascade is not None:
        result["cascade"] = asdict(answer.cascade)
    if answer.fingerprint:
        result["fingerprint"] = answer.fingerprint
    return result


ROUNDS = 4  # of as many rows as are under way at a time
LONGEST_S = 20.0  # after which no more of them are begun
PLANNED = 32  # rows of which the server says how it cuts them
CUTTING = ("max_tiles", "min_tiles", "thumbnail", "tile_policy", "min_pixels", "max_pixels")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A job's cost.

    ``rows`` in all, ``left`` of them to ask. ``sample`` rows were asked, ``failed`` of which had no answer; the others'
    means for a row: pictures, ``unit`` (tiles) of all its pictures, tokens of the pictures, of the whole prompt and of
    the answer. ``rows_s`` as measured on them, the job's ``minutes`` at that rate; both None where none was answered.
    """

    rows: int
    left: int
    sample: int
    failed: int
    first_error: str
    pictures: float
    unit: str
    units: float
    image_tokens: float
    prompt_tokens: float
    answer_tokens: float
    rows_s: float | None
    minutes: float | None


def estimate(job: Job) -> Estimate:
    """Asks a sample of the rows that are left, evenly spread. Nothing is written.

    Raises InvalidRequest for rows that are none, ConnectionFailed or Unavailable where servers stay away.
    """
    with closing(Journal(job.journal)) if job.journal.exists() else nullcontext() as lines:
        index = ResumeIndex(job.source, lines)
    left = np.flatnonzero(index.places < 0)
    wanted = np.zeros(len(index.places), bool)
    if len(left):
        size = min(len(left), ROUNDS * job.concurrency)
        wanted[left[np.linspace(0, len(left) - 1, size).astype(int)]] = True
    rows = list(index.rows(wanted))
    Random(0).shuffle(rows)  # time may end before the last of them
    return run_job(_measured(job, rows, len(wanted), len(left)))


async def _measured(job: Job, rows: list[Row], total: int, left: int) -> Estimate:
    answers, errors = list[Answer](), dict[int, str]()

    async def begun() -> AsyncGenerator[Row, None]:
        for row in rows:
            if time.monotonic() < started + LONGEST_S:
                yield row

    async def ask(row: Row) -> None:
        try:
            pictures, _ = await asyncio.to_thread(contents, row)
            answers.append(await asker.ask(question(row, pictures, job.pool)))
        except TesseraClientError as error:
            errors[row.number] = f"{row.id}: {error}"

    async with job.client() as client:
        asker = Asker(client, job.patience, one_model=True)
        await asker.begin(job.notice)
        plans = await asyncio.gather(*(_plan(client, row) for row in rows[:: -(-len(rows) // PLANNED) or 1]))
        started = time.monotonic()
        await for_each(begun(), ask, job.concurrency)
        seconds = time.monotonic() - started
    cut = [*filter(None, plans)]
    usages = [answer.usage for answer in answers if answer.usage]
    asked = len(answers) + len(errors)
    rate = asked / seconds if usages else None
    return Estimate(
        total,
        left,
        asked,
        len(errors),
        errors[min(errors)] if errors else "",
        pictures=_mean([pictures for pictures, _, _ in cut]),
        unit=next((unit for _, unit, _ in cut if unit), "tiles"),
        units=_mean([units for _, _, units in cut]),
        image_tokens=_mean([usage.image_tokens for usage in usages]),
        prompt_tokens=_mean([usage.prompt_tokens for usage in usages]),
        answer_tokens=_mean([usage.completion_tokens for usage in usages]),
        rows_s=rate and round(rate, 2),
        minutes=rate and round(left / rate / 60, 2),
    )


async def _plan(client: AsyncClient, row: Row) -> tuple[int, str, int] | None:
    """A row's pictures, what their parts are called, and how many parts; None for a row that is refused."""
    if not row.images:
        return 0, "", 0
    try:
        pictures, _ = await asyncio.to_thread(contents, row)
        plans = await client.plan(pictures, **{name: row.options[name] for name in CUTTING if name in row.options})
    except TesseraClientError:
        return None
    return len(plans), plans[0].unit, sum(view.rows * view.columns for plan in plans for view in plan.views)


def _mean(values: list[Any]) -> float:
    return round(fmean(values), 1) if values else 0.0
