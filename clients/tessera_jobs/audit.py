"""``tessera audit``: asks a job's rows again and compares each answer with the recorded one, bit by bit.

JSON keeps the bits of a number, in a file as on its way: it has as many digits as tell the number from all others.
"""

import json
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from tessera_client.client import Client
from tessera_jobs.job import Job
from tessera_jobs.rows import Source
from tessera_wire.errors import InvalidRequest

PARTS = ("weights", "code", "machine or settings", "mode")
"""What the parts of a fingerprint stand for."""


class Audited(NamedTuple):
    """``asked``: answers that were compared, ``with_logprobs`` of them by these too. ``differences``: id and place of
    each that is another now. ``left_out``: rows that had no answer, or that were sampled without a seed.
    ``fingerprint``: of what answered now."""

    asked: int
    with_logprobs: int
    differences: list[tuple[Any, str]]
    left_out: int
    fingerprint: str


def audit(source: Source, answers: Path, url: str, force: bool, **how: Any) -> Audited:
    """Asks all rows of ``source`` again, whose results in ``answers`` `tessera batch` has written.

    ``force``: also where something else answered then, by its fingerprint. ``how``: the other arguments of
    :class:`Job`. Raises as :meth:`Job.run`, and InvalidRequest for results of other rows or of another server.
    """
    with Client(url) as client:
        served = client.ask(None, "Hello", max_tokens=1).fingerprint
    places = {}
    for place, result in results(answers):
        places[result["id"]] = place
        if result["answer"] is not None and not force:
            check_fingerprint(result, served, answers)
    with tempfile.TemporaryDirectory(prefix="tessera-audit-") as folder, open(answers, "rb") as recorded:
        again = Path(folder) / "again.jsonl"
        Job(source, again, url, in_order=True, again=False, force=False, **how).run()
        asked = with_logprobs = left_out = 0
        differences = []
        for row, (_, now) in zip(source.rows(), results(again)):
            recorded.seek(places.get(row.id, 0))
            then = json.loads(recorded.readline()) if row.id in places else {"answer": None}
            if then["answer"] is None or row.unseeded:
                left_out += 1
                continue
            if any(then.get(digest) != now.get(digest) for digest in ("asked", "content")):
                remedy = "give the same requests, and options as --max-tokens, as then"
                raise InvalidRequest(f"row {row.id!r:.80} of {answers} was asked something else", remedy)
            if not force and now["answer"] is not None:
                check_fingerprint(then, now.get("fingerprint", ""), answers)
            asked, with_logprobs = asked + 1, with_logprobs + ("logprobs" in then)
            if where := difference(then, now):
                differences.append((row.id, where))
    return Audited(asked, with_logprobs, differences, left_out, served)


def results(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line's place in bytes, and what it holds. Raises InvalidRequest for one that is no result."""
    place = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                result = json.loads(line)
                result["id"], result["answer"]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise InvalidRequest(f"{path} holds no results of `tessera batch`: {line[:80]!r}") from None
            yield place, result
            place += len(line)


def check_fingerprint(then: dict[str, Any], now: str, answers: Path) -> None:
    """Raises InvalidRequest where another server than the one that answers ``now`` gave a result."""
    said = then.get("fingerprint", "")
    if said and said == now:
        return
    pairs = list(zip_longest(said.split("."), now.split("."), fillvalue=""))
    others = [part for part, (one, other) in zip(PARTS, pairs) if one != other] if len(pairs) == len(PARTS) else []
    what = f": {', '.join(others)} differ" if said and others else ""
    raise InvalidRequest(
        f"row {then['id']!r:.80} of {answers} was answered by {said or 'a server without a fingerprint'}, and here "
        f"answers {now or 'one without'}{what}",
        "bits are kept only where both are equal; --force compares all the same",
    )


def difference(then: dict[str, Any], now: dict[str, Any]) -> str:
    """The first thing in which two results differ, for people; empty if they do not."""
    if now["answer"] is None:
        return f"no answer now: {now['error']}"
    for place, (one, other) in enumerate(zip_longest(then.get("logprobs") or (), now.get("logprobs") or ())):
        if json.dumps(one) != json.dumps(other):  # which tells -0.0 from 0.0
            return f"token {place}: {_token(one)} then, {_token(other)} now"
    for name in ("answer", "finish_reason", "choices", "cascade"):
        one, other = (json.dumps(result.get(name), ensure_ascii=False) for result in (then, now))
        if one != other:
            place = next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
            return f"{name}: {one[max(0, place - 20) :][:60]} then, {other[max(0, place - 20) :][:60]} now"
    return ""


def _token(entry: Any) -> str:
    if not isinstance(entry, dict) or "logprob" not in entry:
        return "none" if entry is None else json.dumps(entry)
    others = "".join(f", {other.get('token_id')} {other['logprob']!r}" for other in entry.get("top", ()))
    return f"{entry.get('token_id')} {entry['logprob']!r}{others and f' (top{others})'}"
