"""What a row's answer depends on, and the rows for which that is no longer what it was."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import islice

from tessera_batch.journal import Journal
from tessera_batch.rows import Row, Source, without_priority
from tessera_batch.survey import Survey
from tessera_client.pictures import encode_images
from tessera_wire.errors import InvalidRequest

FILES = 8  # threads that read pictures
AHEAD = 64  # rows whose pictures are compared at a time


def contents(row: Row) -> tuple[list[bytes], str]:
    """A row's pictures as encoded bytes, and the digest of all that its answer depends on. Raises InvalidRequest."""
    if row.error is not None:
        raise row.error
    pictures = encode_images(row.images)
    asked = without_priority(row.options)
    question = row.question if row.messages is None else row.messages
    state = blake2b(repr((question, asked, [len(picture) for picture in pictures])).encode(), digest_size=16)
    for picture in pictures:
        state.update(picture)
    return pictures, state.hexdigest()


def changed_rows(source: Source, survey: Survey, lines: Journal) -> list[int]:
    """Where the journal's lines begin whose rows have other pictures now.

    Only files whose stat differs are read; where their bytes are the same, the journal says the new one from then on.
    A picture that is gone is no other picture.
    """

    def is_other(row: Row) -> bool:
        place = int(survey.places[row.number])
        line = lines.at(place)
        if not row.stat or int(line["stat"], 16) == row.stat:
            return False
        try:
            same = contents(row)[1] == line.get("content")
        except InvalidRequest:  # it is a picture no more
            return True
        if same:
            lines.restat(place, row.stat)
        return not same

    changed: list[int] = []
    rows = _as_surveyed(source, survey)
    with ThreadPoolExecutor(FILES, "tessera-pictures") as pool:
        while some := list(islice(rows, AHEAD)):
            changed += [int(survey.places[row.number]) for row, other in zip(some, pool.map(is_other, some)) if other]
    return changed


def _as_surveyed(source: Source, survey: Survey) -> Iterator[Row]:
    for row in source.rows(survey.touched) if survey.touched.any() else ():
        if row.number >= len(survey.asked) or row.asked != survey.asked[row.number]:
            raise InvalidRequest(f"{source.path} changed while it was read", "run the same command again")
        yield row
