"""What a job will cost, from some of its rows: how the server cuts their pictures, and how fast it answers them.

They are asked as the job will ask them, as many at a time, and their answers are thrown away: a rate that nobody
measured would be a guess.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Any

import numpy as np

from tessera_client import Answer, AsyncClient
from tessera_jobs.job import Job, question
from tessera_jobs.journal import Journal
from tessera_jobs.rows import Row
from tessera_jobs.survey import Survey, contents
from tessera_wire.errors import TesseraClientError

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
    if job.journal.exists():
        with closing(Journal(job.journal)) as lines:
            survey = Survey(job.source, lines)
    else:
        survey = Survey(job.source)
    left = np.flatnonzero(survey.places < 0)
    wanted = np.zeros(len(survey.places), bool)
    if len(left):
        size = min(len(left), ROUNDS * job.settings.concurrency)
        wanted[left[np.linspace(0, len(left) - 1, size).astype(int)]] = True
    rows = list(survey.rows(wanted))
    Random(0).shuffle(rows)  # time may end before the last of them
    return asyncio.run(_measured(job, rows, len(wanted), len(left)))


async def _measured(job: Job, rows: list[Row], total: int, left: int) -> Estimate:
    slots = asyncio.Semaphore(job.settings.concurrency)

    async def ask(row: Row) -> Answer | TesseraClientError | None:
        async with slots:
            if time.monotonic() > started + LONGEST_S:
                return None
            try:
                pictures, _ = await asyncio.to_thread(contents, row)
                return await asker.ask(question(row, pictures))
            except TesseraClientError as error:
                return error

    async with job.settings.client() as client:
        asker = job.settings.asker(client)
        await asker.begin(job.notice)
        plans = await asyncio.gather(*(_plan(client, row) for row in rows[:: -(-len(rows) // PLANNED) or 1]))
        started = time.monotonic()
        answers = await asyncio.gather(*map(ask, rows))
        seconds = time.monotonic() - started
    cut = [(pictures, unit, units) for pictures, unit, units in filter(None, plans)]
    usages = [answer.usage for answer in answers if isinstance(answer, Answer) and answer.usage]
    asked = sum(answer is not None for answer in answers)
    errors = [f"{row.id}: {error}" for row, error in zip(rows, answers) if isinstance(error, TesseraClientError)]
    rate = asked / seconds if usages else None
    return Estimate(
        total,
        left,
        asked,
        len(errors),
        errors[0] if errors else "",
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
