"""Whether answers keep their bits: asked alone, and again among 256 in flight (`make bench NAME=bits`).

Prompts of 20 to 8,000 tokens, as far as the model's context goes, of which every other begins as others do, three of
ten with pictures, some of them cascades of two cuts; three of ten answers of 256 tokens or more; greedy, and every
fourth sampled with a seed; all with the log probabilities of the five likeliest. The second time with priorities and
drafts, in a pool of three contexts, beside requests that are left after their first token, through a killed language
model. Counted are the answers of which any token or any bit of a log probability is another; with `deterministic` and
without. `digest` is of all tokens and log probabilities of the first time: one on equal GPUs, and with other room.

    python loadtest/bench bits --gpus 0 --weights random --checkpoint loadtest/shapes/internvl3-8b-shape --card h200
    ... --costs W1 W2 W4a W4b        instead: what the mode costs of these workloads' rates, two servers in turns
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, zip_longest
from random import Random
from typing import Any, NamedTuple

import closed_loop
import figures
from closed_loop import Ask, Reply
from measuring import Taken, counted, take
from serving import Running, Setup, add_arguments, serve, setup, setup_notes
from targets import TesseraAsker
from turns import Comparison, compare
from workloads import WORKLOADS, Workload, picture

from tessera.checkpoint.config import CheckpointConfig, TextConfig, context_length
from tessera.models.registry import family_for, read_config
from tessera.prompt.tokenizer import Tokenizer
from tessera_client import Answer, Client, Retry

IN_FLIGHT = 256
SHORTEST, LONGEST = 20, 8000
ROOM = 1000  # tokens for an answer, pictures and what the template adds
MOST_CONTEXT = 32768  # tokens; three of Qwen3-VL's 262,144 would take 116 GB
CONTEXTS = 3  # in the pool
WORDS = ("the", "room", "has", "a", "window", "and", "two", "doors", "near", "old", "red", "wires", "on", "white")
BEGINNINGS = 8  # that prompts share
SIDES = (224, 336, 448)
MARGINS = (0.1, 1.0, 10.0)  # of cascades
LEFT_PART = 8  # requests, beside which one more is left
PATIENCE_S = 900.0
SHOWN = 10


class Case(NamedTuple):
    """A request; ``beside``: what it has more among others, which changes no answer."""

    pictures: list[bytes]
    question: str
    options: dict[str, Any]
    beside: dict[str, Any]


def cases(numbers: Sequence[int], model: CheckpointConfig, context: int) -> list[Case]:
    """Those of these numbers, the same in each run."""
    sample = " ".join(Random(0).choices(WORDS, k=1000))
    words_a_token = 1000 / len(Tokenizer.from_folder(model.folder).encode(sample))
    few = {"max_tiles": 4} if family_for(model).cost_unit == "tiles" else {}
    return [_case(number, words_a_token, min(LONGEST, context - ROOM), few) for number in numbers]


def _case(number: int, words_a_token: float, longest: int, few: dict[str, Any]) -> Case:
    dice = Random(f"bits {number}")
    length = round(words_a_token * SHORTEST * (longest / SHORTEST) ** dice.random())
    shared = Random(number % BEGINNINGS).choices(WORDS, k=round(dice.random() * length)) if number % 2 else []
    question = " ".join(shared + dice.choices(WORDS, k=max(2, length - len(shared))))
    sides = [(dice.choice(SIDES), dice.choice(SIDES)) for _ in range(dice.choice((1, 1, 2)))] if number % 10 < 3 else []
    pictures = [picture(*size, seed=(number, place)) for place, size in enumerate(sides)]
    tokens = dice.randint(256, 320) if number % 10 in (1, 4, 7) else dice.choice((1, 4, 16, 64))
    options: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 5} | few
    if number % 4 == 3:
        options |= {"temperature": 0.8, "top_p": 0.95, "seed": number}
    elif few and number % 10 == 0 and tokens <= 16:
        options["tile_policy"] = {
            "cascade": {"margin": MARGINS[number // 10 % 3], "first": {"max_tiles": 1}, "full": few}
        }
        del options["max_tiles"]
    beside = {"priority": dice.randint(-2, 2)} | ({"draft_pool": "all"} if dice.random() < 0.5 else {})
    return Case(pictures, question, options, beside)


def ask_all(addresses: list[str], asked: Sequence[Case], in_flight: int, kill: threading.Event) -> list[Answer]:
    """Their answers. More than one at a time: with what they have beside others, and beside as many that are left as
    it takes; ``kill`` is set when half of them are answered."""
    mixed = in_flight > 1
    left = max(len(asked) // LEFT_PART, 2 * in_flight - len(asked)) if mixed else 0
    order = [*range(len(asked)), *[None] * left]
    Random(1).shuffle(order)
    found: dict[int, Answer] = {}
    numbers = count()

    @contextmanager
    def prepare(number: int, stock: int) -> Iterator[Ask]:
        with Client(addresses, timeout=PATIENCE_S, retry=Retry.patient(PATIENCE_S)) as client:

            def ask() -> Reply:
                place = next(numbers)
                if (index := order[place]) is None:
                    case = asked[place % len(asked)]
                    with client.stream(case.pictures, case.question, **case.options | {"priority": 3}) as stream:
                        next(iter(stream))
                    return Reply(None, 0)
                case = asked[index]
                found[index] = client.ask(case.pictures, case.question, **case.options | (case.beside if mixed else {}))
                if 2 * len(found) >= len(asked):
                    kill.set()
                return Reply(None, case.options["max_tokens"])

            yield ask

    closed_loop.run(prepare, in_flight, len(order), 0)
    return [found[index] for index in range(len(asked))]


def kill_when(wanted: threading.Event, server: Running, stage: str) -> None:
    """Ends a stage's process, as the kernel does where memory is short."""
    if wanted.wait(PATIENCE_S):
        with urllib.request.urlopen(server.health, timeout=30) as page:
            os.kill(json.load(page)["stages"][stage]["pid"], signal.SIGKILL)


def differ(alone: Answer, beside: Answer) -> tuple[bool, int | None]:
    """Whether tokens do, and at which the first bit of a log probability does (JSON keeps bits), if any."""
    pairs = list(zip_longest(alone.logprobs or (), beside.logprobs or ()))
    ends = (alone.text, alone.finish_reason) != (beside.text, beside.finish_reason)
    tokens = any(one is None or other is None or one["token_id"] != other["token_id"] for one, other in pairs)
    return ends or tokens, next((n for n, (a, b) in enumerate(pairs) if json.dumps(a) != json.dumps(b)), None)


def pool_bytes(text: TextConfig, context: int, itemsize: int) -> int:
    """Of a cache that holds CONTEXTS whole ones."""
    return CONTEXTS * context * 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * itemsize


def run(asked: Setup, requests: Sequence[Case], kill: bool) -> dict[str, Any]:
    """Asks a server alone and then among others; what differs, and what was the case."""
    with serve(asked) as server:
        began, killed = time.monotonic(), threading.Event()
        alone = ask_all(server.grpc, requests, 1, threading.Event())
        between = time.monotonic()
        before = counted(server.metrics[0])
        killer = threading.Thread(target=kill_when, args=(killed, server, "language_model_0_0"), daemon=True)
        if kill:
            killer.start()
        beside = ask_all(server.grpc, requests, IN_FLIGHT, killed)
        ended, after = time.monotonic(), counted(server.metrics[0])
        with urllib.request.urlopen(server.health, timeout=30) as page:
            restarts = json.load(page)["restarts"]
    found = [differ(*pair) for pair in zip(alone, beside)]
    wrong = [number for number, (tokens, place) in enumerate(found) if tokens or place is not None]
    for number in wrong[:SHOWN]:
        told = requests[number].options | requests[number].beside
        words = f"{number}: tokens, first bit: {found[number]} {told} {alone[number].usage} {beside[number].usage}"
        print(words, file=sys.stderr, flush=True)
    prompts = sorted(answer.usage.prompt_tokens for answer in alone if answer.usage)
    said = json.dumps([(answer.text, answer.finish_reason, answer.logprobs) for answer in alone])
    since = after if restarts else after - before  # a server that starts again counts from 0
    return {
        "differences": len(wrong),
        "tokens_differ": sum(tokens for tokens, _ in found),
        "first_bits": [found[number][1] for number in wrong[:SHOWN]],
        "prompt_tokens": [prompts[0], prompts[len(prompts) // 2], prompts[-1]],
        "long_answers": sum(each.options["max_tokens"] >= 256 for each in requests),
        "with_pictures": sum(bool(each.pictures) for each in requests),
        "sampled": sum(each.options["temperature"] > 0 for each in requests),
        "escalated": sum(each.cascade.escalated for each in alone if each.cascade),
        "cascades": sum(each.cascade is not None for each in alone),
        "restarts": restarts,
        "digest": hashlib.sha256(said.encode()).hexdigest()[:16],
        "fingerprints": sorted({answer.fingerprint for answer in (*alone, *beside)}),
        "seconds": [round(between - began), round(ended - between)],
        **{name.removeprefix("tessera_"): since[name] for name in since if "preempt" in name or "cached_tok" in name},
    }


def costs(options: argparse.Namespace, base: Setup) -> None:
    """How much longer the workloads of ``options`` take with the mode, of two servers on shares of a GPU."""

    def ask(server: Running, workload: Workload, seed: int) -> Taken:
        return take(TesseraAsker(server.grpc, workload, seed), options.processes, base.gpus, server.metrics)

    room = {"gpu_memory": "0.42"} if base.gpus else {}
    modes = [replace(base, settings={"deterministic": mode} | room | base.settings) for mode in ("on", "off")]
    with ExitStack() as stack:
        on, off = (stack.enter_context(serve(each)) for each in modes)
        asked = [WORKLOADS[name] for name in options.costs]
        compared = {
            each.name: Comparison(partial(ask, on, each), partial(ask, off, each), lambda taken: taken.run.requests_s)
            for each in asked
        }
        compare(compared, options.seconds)
    for name, each in compared.items():
        rates = [[round(told.run.requests_s, 3) for told in side] for side in zip(*each.turns)]
        about = {"turns": len(each.turns), "req_s_off_on": rates, **setup_notes(options)}
        metric = ".".join(filter(None, ("trial" * (not base.gpus), "bits", name, options.form, "cost")))
        percent = round(100 / each.ratio.value - 100, 2), "%"
        figures.emit(metric, *percent, ci95=round(100 * each.ratio.share, 2), **about)


def part_of(text: str) -> tuple[int, int]:
    """The value of --part."""
    number, total = map(int, text.split("/"))
    if not 1 <= number <= total:
        raise ValueError
    return number, total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument(
        "--part", type=part_of, default=(1, 1), metavar="K/N", help="the Kth of N parts, one after the other"
    )
    parser.add_argument("--card", default="", help="what the figures call the GPU, as in h200")
    parser.add_argument("--form", default="", help="what they call the weights, as in bf16")
    parser.add_argument("--modes", nargs="+", choices=("on", "off"), default=("on", "off"))
    parser.add_argument("--no-kill", dest="kill", action="store_false", help="let the language model live")
    parser.add_argument("--costs", nargs="+", choices=sorted(WORKLOADS), default=[])
    parser.add_argument("--seconds", type=float, default=300.0, help="of --costs, after which no turn begins")
    parser.add_argument("--processes", type=int, default=6, help="of the load of --costs")
    add_arguments(parser)
    options = parser.parse_args()
    base = setup(options)
    if options.costs:
        costs(options, base)
        return 0
    part, parts = options.part
    numbers = range((part - 1) * options.requests // parts, part * options.requests // parts)
    config = read_config(base.checkpoint)
    asked = int(base.settings.get("max_model_len", 0)) or None
    context = min(context_length(config.text, asked), MOST_CONTEXT)
    own = {"language_model.kv_cache_bytes": str(pool_bytes(config.text, context, 2 if base.gpus else 4))}
    own |= {"language_model.drafts": "4", "max_model_len": str(context)}
    requests = cases(numbers, config, context)
    name = ".".join(filter(None, ("bits", options.card or ("gpu" if base.gpus else "cpu"), options.form)))
    worst = 0
    for mode in options.modes:
        settings = own | {"deterministic": mode} | base.settings
        told = run(replace(base, settings=settings, restart=options.kill), requests, options.kill)
        differences = told.pop("differences")
        metric = f"{name}.differences" if mode == "on" else f"{name}.off.differences"
        about = {"of": len(requests), "part": f"{part}/{parts}", "in_flight": IN_FLIGHT, **told, **setup_notes(options)}
        figures.emit(metric, differences, "answers", ceiling=0, **about)
        worst = max(worst, differences if mode == "on" else 0)
    return int(worst > 0)
