"""Whether drafts change an answer: the same requests with drafts and without, token by token (`drafts exact`).

Groups: questions about rooms whose answers match a JSON schema, answers by random schemas, one schema sampled, long
answers with every other option (stop strings, min_tokens, penalties, priorities, biases), those again where the cache
is too small for all, and the blocks of pages. Whatever has a true answer has it as its draft.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from itertools import chain, zip_longest
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import figures
import numpy as np
import torch
from closed_loop import PATIENCE_S
from measuring import counted
from serving import DEFAULT_CHECKPOINT, Running, serve

from bench.drafts import DOCUMENTS, SCHEMA, drafting, figure_name
from tessera_client import Answer, Client, Retry

if TYPE_CHECKING:
    from scene.heldout import HeldoutItem

sys.path.append(str(figures.ROOT / "build" / "default_model"))
PLACES = {
    "rooms": (DEFAULT_CHECKPOINT, {"questions": 4524, "schemas": 2000, "sampled": 500, "options": 500}),
    "small_pool": (DEFAULT_CHECKPOINT, {"options": 600}),
    "pages": (DOCUMENTS, {"pages": 200}),
}
"""A model, and how many requests of each group it is asked."""
SMALL_POOL = {"language_model.kv_cache_bytes": str(1 << 20), "max_model_len": "512"}
"""Holds a few of the sequences that run."""
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


def rooms(counts: Counter[str]) -> list[Case]:
    """This many of each group, about held-out pictures, drawn on all cores."""
    import scene

    with ProcessPoolExecutor() as pool:
        return list(chain(*pool.map(partial(room, counts), scene.heldout()[: max(counts.values())], chunksize=8)))


def room(counts: Mapping[str, int], item: "HeldoutItem") -> list[Case]:
    """What is asked about one of them: a case of each group that is so large."""
    import scene

    number, seed, drawn = item.index, {"seed": item.index}, scene.sample(item.scene_seed, "heldout")
    picture, warm = scene.encode_jpeg(drawn), {"temperature": 0.8} | seed if number % 2 else {}
    schema, other = random_schema(Random(number)), OPTIONS[number % len(OPTIONS)]
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "questions": (item.question, {"json_schema": ANSWER, "max_tokens": 64, "draft_pool": "-"}),
        "schemas": (item.question, {"json_schema": schema, "max_tokens": 200} | warm),
        "sampled": (DESCRIBE, {"json_schema": SCHEMA, "temperature": 1.0, "max_tokens": 300, "draft_pool": "-"} | seed),
        "options": (DESCRIBE, {"max_tokens": 120, "max_tiles": 1, "draft": scene.describe(drawn)} | seed | other),
    }
    content = {"type": "image", "image": picture}
    return [
        Case(group, [{"role": "user", "content": [content, {"type": "text", "text": text}]}], options)
        for group, (text, options) in asked.items()
        if number < counts[group]
    ]


def ask_all(addresses: Sequence[str], cases: Sequence[Case], in_flight: int | None) -> list[Answer]:
    """Their answers, 64 or this many at a time, with log probabilities unless they say otherwise. Who comes when too
    many grammars wait to be compiled comes again."""
    usual, retry = {"temperature": 0, "logprobs": 0}, Retry.patient()
    with (
        Client(list(addresses), timeout=PATIENCE_S, retry=retry) as client,
        ThreadPoolExecutor(in_flight or 64) as pool,
    ):
        return list(pool.map(lambda case: client.chat(case.messages, **usual | case.options), cases))


def difference(with_drafts: Answer, without: Answer) -> Difference:
    """Where two answers part."""
    off = 0.0
    for place, (one, other) in enumerate(zip_longest(with_drafts.logprobs or (), without.logprobs or ())):
        if one is None or other is None:
            return Difference(place, inf, off)
        gap = abs(one["logprob"] - other["logprob"])
        if one["token_id"] != other["token_id"]:
            return Difference(place, gap, off)
        off = max(off, gap)
    if (with_drafts.text, with_drafts.finish_reason) != (without.text, without.finish_reason):
        return Difference(len(without.logprobs or ()), inf, off)
    return Difference(None, 0.0, off)


def chi_square(one: Sequence[str], other: Sequence[str]) -> float:
    """The probability that two samples of one distribution differ as much as these; 1 where there is one kind."""
    found = np.array([[side.count(kind) for kind in sorted({*one, *other})] for side in (one, other)], float)
    expected = np.outer(found.sum(1), found.sum(0)) / found.sum()
    rare = expected.min(0) < LEAST_EXPECTED
    found, expected = (np.column_stack([each[:, ~rare], each[:, rare].sum(1)]) for each in (found, expected))
    kinds = expected[0] > 0
    if kinds.sum() < 2:
        return 1.0
    square = ((found - expected)[:, kinds] ** 2 / expected[:, kinds]).sum()
    return float(torch.special.gammaincc(torch.tensor((kinds.sum() - 1) / 2), torch.tensor(square / 2)))


def least_probability(one: Sequence[str], other: Sequence[str]) -> float:
    """The least of :func:`chi_square` over the schema's fields, times their number (Bonferroni)."""
    read = [[json.loads(text) for text in texts] for texts in (one, other)]
    fields = SCHEMA["required"]
    return min(1.0, len(fields) * min(chi_square(*([repr(r[name]) for r in side] for side in read)) for name in fields))


def cases_of(name: str, options: argparse.Namespace) -> list[Case]:
    """What a place is asked."""
    from bench.drafts_documents import page_requests

    counts = Counter({group: round(options.share * count) for group, count in PLACES[name][1].items()})
    if not counts["pages"]:
        return rooms(counts)
    return [asked.case for page in page_requests(options.pages, counts["pages"]) for asked in page]


def run(options: argparse.Namespace) -> int:
    """Asks a server with drafts, then one without, and emits what differs; 1 where anything does."""
    differ = 0
    asked = {name: cases_of(name, options) for name in options.places}  # before a client is: its library hates a fork
    for name, cases in asked.items():
        checkpoint = options.checkpoint or PLACES[name][0]
        above, below = drafting(options, checkpoint, SMALL_POOL if name == "small_pool" else {})
        if not options.gpus or above.settings.get("deterministic") == "on":  # nothing may differ: half need not say why
            cases[::2] = [case._replace(options=case.options | {"logprobs": None}) for case in cases[::2]]
        others = [case._replace(options=case.options | {"seed": OTHER_SEEDS + number})
                  for number, case in enumerate(cases) if case.group == "sampled"]  # fmt: skip
        with serve(above) as server:
            on, notes = ask_all(server.grpc, cases, options.in_flight), proposals(server)
        with serve(below) as server:
            off, drawn = (ask_all(server.grpc, each, options.in_flight) for each in (cases, others))
            found, noise = list(map(difference, on, off)), list[Difference]()
            if any(each.place is not None for each in found):
                noise = list(map(difference, off, ask_all(server.grpc, cases[::-1], options.in_flight)[::-1]))
        differ += report(name, options, cases, found, noise, notes)
        if drawn:
            sampled = [answer.text for case, answer in zip(cases, on) if case.group == "sampled"]
            likely = least_probability(sampled, [answer.text for answer in drawn])
            figures.emit(figure_name(options, "chi_square_p"), round(likely, 4), "probability", answers=len(drawn))
    return int(differ > 0)


def proposals(server: Running) -> dict[str, float]:
    """What a server has counted of drafts, and of sequences that gave way."""
    counts = sum(map(counted, server.metrics), Counter[str]())
    told = ("preempt", "drafted", "accepted")
    return {name.removeprefix("tessera_"): counts[name] for name in sorted(counts) if any(w in name for w in told)}


def report(
    place: str,
    options: argparse.Namespace,
    cases: Sequence[Case],
    found: Sequence[Difference],
    noise: Sequence[Difference],
    notes: Mapping[str, Any],
) -> int:
    """Emits, and returns, how many answers differ; beside them (``undrafted``) how many do if the server without drafts
    is asked again in another order, by ``noise``."""
    for number, (case, each) in enumerate(zip(cases, found)):
        if each.place is not None:
            shown = {name: value for name, value in case.options.items() if name != "draft"}
            print(f"{case.group} {number}: {each} {shown!s:.200}", file=sys.stderr, flush=True)
    about = {"asked": dict(Counter(case.group for case in cases)), **tallied(cases, found, options), **notes}
    if noise:
        about["undrafted"] = tallied(cases, noise, options)
    total = sum(about["differ"].values())
    figures.emit(figure_name(options, f"differences.{place}"), total, "answers", None, 0, **about)
    return total


def tallied(cases: Sequence[Case], found: Sequence[Difference], options: argparse.Namespace) -> dict[str, Any]:
    """How many differ. On a GPU greedy ones may where two tokens are near: these count apart, as sampled ones do,
    whose distribution is looked at instead. On the CPU none may, nor where the server keeps all bits."""
    groups, apart = Counter[str](), {"near_ties": 0, "sampled": 0}
    exact = not options.gpus or "deterministic=on" in options.settings
    for case, each in zip(cases, found):
        kind = "sampled" if case.options.get("temperature") else "near_ties" if each.gap < NEAR else ""
        if each.place is not None and kind and not exact:
            apart[kind] += 1
        elif each.place is not None:
            groups[case.group] += 1
    return {
        "differ": dict(groups),
        **apart,
        "most_logprobs_differ": round(max((each.off for each in found), default=0.0), 6),
    }
