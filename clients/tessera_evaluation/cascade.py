"""Plans a cascade on the user's own pictures: each is asked both ways, and the margin is chosen below which the full
cut must answer. What comes of it is the policy to deploy, with its evidence and with what the server is to watch
(docs/cascade.md).

How small a margin may be at which a first, cheap answer still counts, so that with a stated confidence no more than a
stated share of all answers differs from what the full cut would have said, is Learn then Test (Angelopoulos, Bates,
Candès, Jordan and Lei 2021, "Learn then Test: Calibrating predictive algorithms to achieve risk control"): each
threshold is a hypothesis that too many answers would differ. Thresholds stand in an order that no data chose, the
safest first, and each is tested at the whole level until one is not rejected (fixed-sequence testing), so that the
chance of ever taking one that breaks the bound is at most 1 - confidence. An answer differs or does not, so a
hypothesis' p-value is the binomial's own tail, which holds for any number of pictures (Clopper and Pearson 1934).

This takes pictures and questions to be drawn independently from what will be asked, and the model not to change.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from math import exp, fsum, inf, isinf, lgamma, log, log1p
from pathlib import Path
from random import Random
from typing import Any

from tessera_client.client import Client
from tessera_client.messages import Answer
from tessera_evaluation.datasets import Item
from tessera_evaluation.recall import Outcome
from tessera_wire import MOST_TOKENS, __version__, question_class
from tessera_wire.errors import InvalidRequest, ProtocolError

REST = "margin"
"""The class of questions that have no threshold of their own, by the policy's key for theirs."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One question asked both ways: the first answer's margin in nats, infinite where it has none, and whether the full
    cut's is another. Tokens are those of the pictures. ``right``: of the first and of the full answer, None where no
    right one is known."""

    question: str
    margin: float
    differs: bool
    first_tokens: int
    full_tokens: int
    right: tuple[bool, bool] | None = None


def one_a_picture(items: Sequence[Item], limit: int | None = None) -> list[Item]:
    """One of each picture's questions, drawn: answers about one picture are no independent evidence. At most ``limit``,
    drawn as well."""
    dice, of_picture = Random(0), defaultdict[Path, list[Item]](list)
    for item in items:
        of_picture[item.picture].append(item)
    drawn = [dice.choice(some) for some in of_picture.values()]
    return drawn if limit is None or limit >= len(drawn) else dice.sample(drawn, limit)


def ask_both(
    client: Client,
    items: Sequence[Item],
    first: Any = None,
    full: Any = None,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> list[Pair]:
    """Asks every question with the first cut, which tells its margin, and with the full one. A policy of None is the
    server's: its cheapest cut, and its own. Answers that may be longer than a cascade's have no margin, and want a
    ``first`` policy. Raises the first error there is; a plan on the rest would be of others."""
    cuts = {name: policy for name, policy in (("first", first), ("full", full)) if policy is not None}
    long = "choices" not in options and options["max_tokens"] > MOST_TOKENS
    begin = first if long else {"cascade": {"margin": 0, **cuts}}
    policies = (begin, {} if full is None else full)  # {} is no deployment's cascade

    def answers(turn: int) -> list[Answer]:
        def ended(done: int) -> None:
            if progress is not None:
                progress(done + turn * len(items), 2 * len(items))

        asked = [(item.picture, item.question) for item in items]
        return list(client.ask_many(asked, tile_policy=policies[turn], progress=ended, **options))

    return [_pair(item, long, *both) for item, both in zip(items, zip(answers(0), answers(1)), strict=True)]


def _pair(item: Item, long: bool, first: Answer, full: Answer) -> Pair:
    margin = inf if long else first.cascade.margin if first.cascade else None
    if margin is None or first.usage is None or full.usage is None:
        raise ProtocolError("the server did not say the answer's margin", "an older server knows of no cascades")
    right = (Outcome(item, first.text).right, Outcome(item, full.text).right) if item.answer else None
    tokens = first.usage.image_tokens, full.usage.image_tokens
    return Pair(item.question, margin, first.text != full.text, *tokens, right)


def plan(pairs: Sequence[Pair], disagree: float, confidence: float, each_question: bool = False) -> dict[str, Any]:
    """The policy file's ``margin`` and ``classes``, ``watch`` (what the server compares with) and ``evidence``. Where
    answers have no margin, the first cut may be used for all of them (``margin`` is 0) or is refused, and there is
    nothing to watch.

    ``each_question``: the bound is to hold for every question that has enough pictures by itself, and for all others
    together, with this confidence for all of them at once: each has its part of the chance that it does not.

    Raises InvalidRequest where there are too few pictures, or the first cut is too often wrong where it is surest.
    """
    groups = _groups(pairs, disagree, confidence) if each_question else {REST: list(pairs)}
    level = 1 - (1 - confidence) / len(groups)
    chosen = {
        name: choose([(pair.margin, pair.differs) for pair in some], disagree, level) for name, some in groups.items()
    }
    if all(isinf(threshold) for threshold, _ in chosen.values()):
        largest = max(groups, key=lambda name: len(groups[name]))
        raise _refusal(len(groups[largest]), chosen[largest][1][0].differ, disagree, level)
    margins = {name: threshold for name, (threshold, _) in chosen.items()}
    least = [margins.get(question_class(pair.question), margins.get(REST, inf)) for pair in pairs]
    escalated = [pair.margin < threshold for pair, threshold in zip(pairs, least, strict=True)]
    return {
        "margin": _number(margins.pop(REST, inf)),
        **({"classes": {name: _number(threshold) for name, threshold in margins.items()}} if margins else {}),
        **({} if isinf(pairs[0].margin) else {"watch": watched(pairs, escalated, disagree, confidence)}),
        "evidence": {
            "disagree": disagree,
            "confidence": confidence,
            "pictures": len(pairs),
            "escalated": sum(escalated),
            "differ": sum(pair.differs and not up for pair, up in zip(pairs, escalated)),
            "differ_without": sum(pair.differs for pair in pairs),
            "tokens": _tokens(pairs, escalated),
            **_recall(pairs, escalated),
            "tried": {
                name: [[each.threshold, each.differ, float(f"{each.p_value:.3g}")] for each in tried]
                for name, (_, tried) in chosen.items()
            },
        },
    }


def _groups(pairs: Sequence[Pair], disagree: float, confidence: float) -> dict[str, list[Pair]]:
    """As many questions by themselves as have enough pictures each, and the rest."""
    of_class = defaultdict[str, list[Pair]](list)
    for pair in pairs:
        of_class[question_class(pair.question)].append(pair)
    names = sorted(of_class, key=lambda name: -len(of_class[name]))
    for own in range(len(names), -1, -1):
        parts = own + (own < len(names))
        if own == 0 or len(of_class[names[own - 1]]) >= needed(disagree, 1 - (1 - confidence) / parts):
            break
    rest = [pair for name in names[own:] for pair in of_class[name]]
    return {name: of_class[name] for name in names[:own]} | ({REST: rest} if rest else {})


def check_enough(pictures: int, disagree: float, confidence: float) -> None:
    """Raises InvalidRequest where so few pictures could show nothing, whatever their answers."""
    if pictures < needed(disagree, confidence):
        raise _refusal(pictures, 0, disagree, confidence)


def _refusal(pictures: int, differ: int, disagree: float, level: float) -> InvalidRequest:
    wanted = needed(disagree, level, differ)
    promise = f"at most {100 * disagree:g} % may differ, with {100 * level:g} % confidence"
    if differ:
        why = f"{differ} of {pictures} answers differ of which the model is as sure as can be"
        return InvalidRequest(f"{why}: that {promise} takes {wanted} pictures with no more of them")
    return InvalidRequest(f"{pictures} pictures cannot show that {promise}: it takes {wanted} at least")


def watched(pairs: Sequence[Pair], escalated: Sequence[bool], disagree: float, confidence: float) -> dict[str, Any]:
    """What tessera.cascade reads: shares with their upper limits, each with this confidence."""
    margins = sorted(pair.margin for pair in pairs)
    low, high = margins[len(margins) // 4], margins[-1 - len(margins) // 4]
    counts = {
        "escalated": sum(escalated),
        "below": sum(margin < low for margin in margins),
        "above": sum(margin > high for margin in margins),
    }
    shares = {name: (count / len(pairs), upper_limit(count, len(pairs), confidence)) for name, count in counts.items()}
    kept = len(pairs) - sum(escalated)
    promised = min(1.0, disagree * len(pairs) / kept) if kept else 1.0
    shares["disagreed"] = promised, promised
    events = {name: {"share": round(share, 6), "limit": round(limit, 6)} for name, (share, limit) in shares.items()}
    return {"low": low, "high": high, **events}


def _tokens(pairs: Sequence[Pair], escalated: Sequence[bool]) -> dict[str, float]:
    """Of pictures, a question, by the cascade and by the full cut alone."""
    full = [pair.full_tokens for pair in pairs]
    both = [pair.first_tokens + up * pair.full_tokens for pair, up in zip(pairs, escalated)]
    return {"cascade": round(sum(both) / len(pairs), 1), "full": round(sum(full) / len(pairs), 1)}


def _recall(pairs: Sequence[Pair], escalated: Sequence[bool]) -> dict[str, Any]:
    """The share of right answers by the cascade, the first cut and the full one; nothing without labels."""
    known = [(*pair.right, up) for pair, up in zip(pairs, escalated) if pair.right is not None]
    if not known:
        return {}
    counts = sum(full if up else first for first, full, up in known), sum(k[0] for k in known), sum(k[1] for k in known)
    return {"recall": {name: round(n / len(known), 6) for name, n in zip(("cascade", "first", "full"), counts)}}


def _number(threshold: float) -> float | str:
    """As the policy has it."""
    return "inf" if isinf(threshold) else threshold


def document(
    policy: Mapping[str, Any], first: Any = None, full: Any = None, about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The policy file: ``tile_policy`` as a deployment or a request has it, ``watch``, and ``evidence`` with what is
    known ``about`` the run. Without anything to watch, the first cut is the policy."""
    cuts = {name: cut for name, cut in (("first", first), ("full", full)) if cut is not None}
    cascade = cuts | {name: policy[name] for name in ("margin", "classes") if name in policy}
    evidence = {**policy["evidence"], **(about or {}), "tessera": __version__, "date": date.today().isoformat()}
    if "watch" not in policy:
        return {"tile_policy": first, "evidence": evidence}
    return {"tile_policy": {"cascade": cascade}, "watch": policy["watch"], "evidence": evidence}


def print_plan(policy: Mapping[str, Any], console: Any) -> None:
    """What was found, in words, on a rich console."""
    evidence = policy["evidence"]
    shares = {name: 100 * evidence[name] / evidence["pictures"] for name in ("differ_without", "escalated", "differ")}
    most, sure = 100 * evidence["disagree"], 100 * evidence["confidence"]
    kept = f"margin {policy['margin']} nats: {shares['escalated']:.3g} % are escalated"
    lines = [
        f"{evidence['pictures']} pictures: the cuts differ in {shares['differ_without']:.3g} % of the answers",
        f"{kept if 'watch' in policy else 'the first cut for all'}, {shares['differ']:.3g} % differ "
        f"(at most {most:g} % with {sure:g} % confidence)",
        "image tokens a question: {cascade:g}, the full cut alone {full:g}".format(**evidence["tokens"]),
    ]
    right = evidence.get("recall", {})
    lines += [f"right answers, {name}: {100 * share:.2f} %" for name, share in right.items()]
    lines += [f"{len(policy['classes'])} questions have margins of their own"] if "classes" in policy else []
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


THRESHOLDS = (*(round(64 / 2 ** (step / 16), 4) for step in range(16 * 12 + 1)), 0.0)
"""Nats, from the safest on; at the last nothing is ever escalated."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One threshold: how many answers with this margin or more differ, and how likely so few are if the bound fails."""

    threshold: float
    differ: int
    p_value: float


def tail(events: int, of: int, share: float) -> float:
    """The chance of at most ``events`` among ``of`` that each have this chance (0 < share < 1): the binomial's tail."""
    if events >= of:
        return 1.0
    logs = lgamma(of + 1), log(share), log1p(-share)

    def chance(count: int) -> float:
        ways = logs[0] - lgamma(count + 1) - lgamma(of - count + 1)
        return exp(ways + count * logs[1] + (of - count) * logs[2])

    return min(fsum(map(chance, range(events + 1))), 1.0)


def upper_limit(events: int, of: int, confidence: float) -> float:
    """What a share is at most, with this confidence, of which ``events`` among ``of`` (1 or more) were seen."""
    if events >= of:
        return 1.0
    low, high = events / of, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if tail(events, of, middle) > 1 - confidence else (low, middle)
    return high


def needed(disagree: float, confidence: float, differ: int = 0) -> int:
    """The fewest answers of which ``differ`` may differ for the bound to hold with this confidence."""
    most = differ + 1
    while tail(differ, most, disagree) > 1 - confidence:
        most *= 2
    return bisect_left(range(most), -(1 - confidence), key=lambda of: -tail(differ, of, disagree))


def choose(answers: Sequence[tuple[float, bool]], disagree: float, confidence: float) -> tuple[float, list[Tried]]:
    """The least threshold, in nats, that holds the bound, and what was tried up to the first that does not.

    ``answers``: each one's margin and whether it differs from the full cut's. The threshold is infinite, all are to be
    escalated, where not even the first one holds: fewer than :func:`needed`, or wrong where the model is surest.
    """
    wrong = sorted(margin for margin, differs in answers if differs)
    chosen, tried = inf, list[Tried]()
    for threshold in THRESHOLDS:
        differ = len(wrong) - bisect_left(wrong, threshold)
        tried.append(Tried(threshold, differ, tail(differ, len(answers), disagree)))
        if tried[-1].p_value > 1 - confidence:
            break
        chosen = threshold
    return chosen, tried
