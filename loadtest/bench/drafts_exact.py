"""Whether drafts change an answer: the same requests with drafts and without, token by token (`drafts exact`).

Groups: questions about rooms whose answers match a JSON schema, answers by random schemas, one schema sampled, long
answers with every other option (stop strings, min_tokens, penalties, priorities, biases), those again where the cache
is too small for all, and the blocks of pages. Whatever has a true answer has it as its draft.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import figures
import torch
from closed_loop import PATIENCE_S
from measuring import counted
from serving import DEFAULT_CHECKPOINT, Running, serve

from bench.drafts import DOCUMENTS, SCHEMA, drafting, figure_name
from tessera_client import Answer, Client, Retry

sys.path.append(str(figures.ROOT / "build" / "default_model"))
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 40}},
    "required": ["answer"],
    "additionalProperties": False,
}
NEAR = 0.05
"""Between the log probabilities of two tokens that rounding may put either way."""
LEAST_EXPECTED = 5.0
"""Answers of a kind; rarer kinds count together."""
DESCRIBE = "Describe this room."
OTHER_SEEDS = 1 << 20
SMALL = str(1 << 20)
"""Bytes of a cache that holds a few of the sequences that run."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {"stop": [" and ", ". "]},
    {"min_tokens": 40, "max_tokens": 60},
    {"presence_penalty": 0.8, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.2, "priority": -3},
    {"no_repeat_ngram_size": 3, "priority": 3},
    {"ignore_eos": True, "max_tokens": 90},
    {"logit_bias": {"30": 3.0, "40": -100.0}},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "stop": ["the"]},
    {"regex": "(There is|I see) [a-z ]{4,30}\\."},
)


class Case(NamedTuple):
    """A request, by the SDK's words."""

    group: str
    messages: list[dict[str, Any]]
    options: dict[str, Any]

    @classmethod
    def about(cls, group: str, picture: bytes, text: str, **options: Any) -> Case:
        content = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
        return cls(group, [{"role": "user", "content": content}], options)

    @property
    def sampled(self) -> bool:
        return bool(self.options.get("temperature"))


class Difference(NamedTuple):
    """``place``: of the first token that differs, None: all are equal. ``gap``: between the log probabilities of the
    two tokens there, the model's own, before penalties; infinite where an answer has ended. ``off``: the most that
    those of the tokens before it differ."""

    place: int | None
    gap: float
    off: float


def random_schema(dice: Random, depth: int = 0) -> dict[str, Any]:
    """An object at the top; what is below it is of any kind, and ends."""
    kind = dice.choice(("object", "object", "array", "enum", "string", "integer", "boolean", "null", "either"))
    if depth == 0 or (kind == "object" and depth < 3):
        names = dice.sample(["room", "name", "is_open", "Count", "größe", "a b", "x", "long_name_of_a_field"], 3)
        properties = {name: random_schema(dice, depth + 1) for name in names[: dice.randint(1, 3)]}
        required = [name for name in properties if dice.random() < 0.8]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array" and depth < 3:
        return {"type": "array", "items": random_schema(dice, depth + 1), "maxItems": dice.randint(1, 3)}
    if kind == "either" and depth < 3:
        return {"anyOf": [random_schema(dice, depth + 1), {"type": "null"}]}
    if kind == "enum":
        return {"enum": dice.sample(["yes", "no", "yesterday", "not in sight", "ünklar", 1, 12, True, None], 3)}
    if kind == "integer":
        return {"type": "integer", "minimum": dice.randint(-50, 0), "maximum": dice.randint(1, 5000)}
    return {"type": kind} if kind in ("boolean", "null") else {"type": "string", "maxLength": dice.randint(1, 24)}


def rooms(counts: Counter[str]) -> Iterator[Case]:
    """This many of each group, about held-out pictures."""
    import scene

    for number, item in enumerate(scene.heldout()[: max(counts.values())]):
        room = scene.sample(item.scene_seed, "heldout")
        picture, dice = scene.encode_jpeg(room), Random(number)
        if number < counts["questions"]:
            yield Case.about("questions", picture, item.question, json_schema=ANSWER, max_tokens=64)
        if number < counts["schemas"]:
            how = {"temperature": 0.8, "seed": number} if number % 2 else {}
            schema = random_schema(dice)
            yield Case.about("schemas", picture, item.question, json_schema=schema, max_tokens=200, **how)
        if number < counts["sampled"]:
            how = {"json_schema": SCHEMA, "temperature": 1.0, "seed": number}
            yield Case.about("sampled", picture, DESCRIBE, max_tokens=300, **how)
        if number < counts["options"]:
            how = {"max_tokens": 120, "seed": number, "max_tiles": 1, **OPTIONS[number % len(OPTIONS)]}
            yield Case.about("options", picture, DESCRIBE, **how, draft=scene.describe(room))


def ask_all(addresses: Sequence[str], cases: Sequence[Case], in_flight: int) -> list[Answer]:
    """Their answers, this many at a time, with log probabilities unless they say otherwise."""
    with (
        Client(list(addresses), timeout=PATIENCE_S, retry=Retry(attempts=1)) as client,
        ThreadPoolExecutor(in_flight) as pool,
    ):
        usual = {"temperature": 0, "logprobs": 0}
        asked = lambda case: client.chat(case.messages, **usual | case.options)  # noqa: E731
        return list(pool.map(asked, cases))


def difference(with_drafts: Answer, without: Answer) -> Difference:
    """Where two answers part."""
    off = 0.0
    for place, (one, other) in enumerate(zip_longest(with_drafts.logprobs or (), without.logprobs or ())):
        if one is None or other is None:
            return Difference(place, inf, off)
        if one["token_id"] != other["token_id"]:
            return Difference(place, abs(one["logprob"] - other["logprob"]), off)
        off = max(off, abs(one["logprob"] - other["logprob"]))
    if (with_drafts.text, with_drafts.finish_reason) != (without.text, without.finish_reason):
        return Difference(len(without.logprobs or ()), inf, off)
    return Difference(None, 0.0, off)


def chi_square(one: Sequence[str], other: Sequence[str]) -> float:
    """The probability that two samples of one distribution differ as much as these; 1 where there is one kind."""
    counts, kinds = (Counter(one), Counter(other)), Counter([*one, *other])
    sizes = len(one), len(other)
    expects = [{kind: size * n / sum(sizes) for kind, n in kinds.items()} for size in sizes]
    common = [kind for kind in kinds if min(each[kind] for each in expects) >= LEAST_EXPECTED]
    cells = [[(found[kind], expected[kind]) for kind in common] for found, expected in zip(counts, expects)]
    for cell, size in zip(cells, sizes):
        if rest := size - sum(expected for _, expected in cell):
            cell.append((size - sum(found for found, _ in cell), rest))
    freedom = len(cells[0]) - 1
    if freedom < 1:
        return 1.0
    square = sum((found - expected) ** 2 / expected for cell in cells for found, expected in cell)
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(square / 2.0)))


def least_probability(one: Sequence[str], other: Sequence[str]) -> float:
    """The least of :func:`chi_square` over the schema's fields, times their number (Bonferroni)."""
    read = [[json.loads(text) for text in texts] for texts in (one, other)]
    fields = SCHEMA["required"]
    return min(1.0, len(fields) * min(chi_square(*([repr(r[name]) for r in side] for side in read)) for name in fields))


@dataclass(frozen=True)
class Place:
    """A model, how its server is set up, and what it is asked: this many of each group."""

    checkpoint: Path
    counts: Mapping[str, int]
    settings: Mapping[str, str] = field(default_factory=dict)

    def cases(self, share: float, pages: Path) -> list[Case]:
        from bench.drafts_documents import page_cases

        counts = Counter({group: round(share * count) for group, count in self.counts.items()})
        return list(page_cases(pages, counts["pages"]) if "pages" in counts else rooms(counts))


PLACES = {
    "rooms": Place(DEFAULT_CHECKPOINT, {"questions": 4524, "schemas": 2000, "sampled": 500, "options": 500}),
    "small_pool": Place(DEFAULT_CHECKPOINT, {"options": 600}, {"language_model.kv_cache_bytes": SMALL}),
    "pages": Place(DOCUMENTS, {"pages": 200}),
}


def run(options: argparse.Namespace) -> int:
    """Asks a server with drafts, then one without, and emits what differs; 1 where anything does."""
    differ = 0
    for name in options.places:
        place = PLACES[name]
        above, below = drafting(options, options.checkpoint or place.checkpoint, place.settings)
        cases = place.cases(options.share, options.pages)
        if not options.gpus:  # where nothing may differ, half of them need not tell why
            cases[::2] = [case._replace(options=case.options | {"logprobs": None}) for case in cases[::2]]
        others = [case._replace(options=case.options | {"seed": OTHER_SEEDS + number})
                  for number, case in enumerate(cases) if case.group == "sampled"]  # fmt: skip
        with serve(above) as server:
            on = ask_all(server.grpc, cases, options.in_flight or 64)
            notes = proposals(server)
        with serve(below) as server:
            off, drawn = (ask_all(server.grpc, asked, options.in_flight or 64) for asked in (cases, others))
        differ += report(name, options, cases, list(map(difference, on, off)), notes)
        if drawn:
            sampled = [answer.text for case, answer in zip(cases, on) if case.group == "sampled"]
            likely = least_probability(sampled, [answer.text for answer in drawn])
            figures.emit(figure_name(options, "chi_square_p"), round(likely, 4), "probability", answers=len(drawn))
    return int(differ > 0)


def proposals(server: Running) -> dict[str, float]:
    """What a server has counted of drafts, and of sequences that gave way."""
    counts = [counted(url) for url in server.metrics]
    names = {name for each in counts for name in each if "preempt" in name or "drafted" in name or "accepted" in name}
    return {name.removeprefix("tessera_"): sum(each[name] for each in counts) for name in sorted(names)}


def report(
    place: str,
    options: argparse.Namespace,
    cases: Sequence[Case],
    found: Sequence[Difference],
    notes: Mapping[str, Any],
) -> int:
    """Emits, and returns, how many answers differ. On a GPU greedy ones may where two tokens are near: these
    count apart, as sampled ones do, whose distribution is looked at instead. On the CPU none may."""
    asked, groups = Counter(case.group for case in cases), Counter[str]()
    apart = {"near_ties": 0, "sampled": 0}
    for number, (case, each) in enumerate(zip(cases, found)):
        if each.place is None:
            continue
        kind = "sampled" if case.sampled else "near_ties" if each.gap < NEAR else ""
        if options.gpus and kind:
            apart[kind] += 1
        else:
            groups[case.group] += 1
        shown = {name: value for name, value in case.options.items() if name != "draft"}
        print(f"{case.group} {number}: {each} {shown!s:.200}", file=sys.stderr, flush=True)
    about = {"asked": dict(asked), "differ": dict(groups), **apart, **notes}
    about["most_logprobs_differ"] = round(max((each.off for each in found), default=0.0), 6)
    figures.emit(figure_name(options, f"differences.{place}"), sum(groups.values()), "answers", None, 0, **about)
    return sum(groups.values())
