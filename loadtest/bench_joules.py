"""Where the joules of a request go, on one GPU, in this process (`make bench NAME=joules`): InternVL3-8B's shape.

A step of 8,192 prompt tokens, decode steps of 10 and of 64 sequences and a forward of 32 tiles run once while every
kind of call that they make is recorded. Each kind then runs alone in a loop, with all layers' weights and the step's
own activations, long enough for the counter of joules; so does the whole. The account is the sum of the parts beside
the whole: of a step, of a forward, and of the requests of W1, W2, W4a and W4b, beside what these cost through the
server. Beside it: attention against torch's kernels, and the gate-up product with the activation behind it or in it.

    PYTHONPATH=python_backends:clients:loadtest python3 loadtest/bench_joules.py [--quantization fp8]
    PYTHONPATH=python_backends:clients:loadtest python3 loadtest/bench_joules.py --accounts algorithms

Less than 280 s with all but the algorithms (cuBLASLt's, for each product by joules and by time), those less than 90 s.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bench_attention
import cublaslt
import figures
import torch
import torch.nn.functional as F
from energy import Cost, Lap, Repeater
from gpu_power import GpuPower
from gpu_standins import Place
from joules_account import ASKS, WRITERS, Account, Language, Report, Sizes, account_of
from recorded_calls import RecordedCalls
from report import newest

from tessera.checkpoint.config import CheckpointConfig, TextConfig, read_config
from tessera.kernels.tower_layers import PLAIN, TowerKernels
from tessera.kernels.tuning import MeasuredChoices, choices_path, graph_milliseconds, layer_kernels
from tessera.models.internvl.vision import InternViT
from tessera.settings.stages import VisionSettings
from tessera.vision.fp8_tower import serving_tower
from tessera.vision.torch_runner import GraphRunner

STANDARD = Sizes()
SHAPE = figures.ROOT / "loadtest" / "shapes" / "internvl3-8b-shape"
ACCOUNTS = ("prefill", "decode", "vision", "attention", "gate_up", "algorithms")
INTERVAL_S = 0.005
GATE_UP_ROWS = (8192, 2528)  # a full step, and eight prompts of W1
ATTENTIONS = (bench_attention.Case(26, 316, 316), bench_attention.Case(3, 2364, 2364))


def prefill(language: Language, repeater: Repeater, report: Report) -> dict[str, Account]:
    """By workload. Its requests differ in their attention; the rest of a step is measured once."""
    accounts: dict[str, Account] = {}
    for name, ask in ASKS.items():
        batch = language.step(ask)
        whole = repeater.cost(partial(language.runner.launch, batch))
        calls = language.recorded(batch)
        known = {part: cost for part, cost in accounts["W1"].parts.items() if part != "attention"} if accounts else {}
        prompts = f"{len(batch.sampling)} prompts of {ask.prompt} and {batch.tokens - len(batch.sampling) * ask.prompt}"
        report.title(f"step of {prompts} tokens")
        accounts[name] = account_of(calls, whole, repeater, report, known)
        calls.forget()
    for part, cost in {**accounts["W1"].parts, **accounts["W1"].within}.items():
        report.cost(f"prefill.{part}", cost, "J/step")
    report.cost("prefill.attention_W2", accounts["W2"].parts["attention"], "J/step")
    for name, account in accounts.items():
        report.cost(f"prefill.whole_{name}", account.whole, "J/step")
        report.figure(f"prefill.explained_{name}", account.joules / account.whole.joules, "share")
    return accounts


def decode(language: Language, repeater: Repeater, report: Report) -> dict[str, Cost]:
    """Whole decode steps, by workload."""
    wholes: dict[str, Cost] = {}
    for name, ask in WRITERS.items():
        lap, calls = language.decode(ask)
        wholes[name] = repeater.cost(lap)
        report.title(f"decode step of {ask.together} sequences")
        account = account_of(calls, wholes[name], repeater, report, {})
        calls.forget()
        group = f"decode.b{ask.together}"
        for part, cost in {**account.parts, **account.within}.items():
            report.cost(f"{group}.{part}", cost, "J/step")
        report.cost(f"{group}.whole", wholes[name], "J/step")
        report.figure(f"{group}.explained", account.joules / wholes[name].joules, "share")
        report.figure(f"{group}.explained_time", account.seconds / wholes[name].seconds, "share")
    return wholes


# --- the vision tower


@torch.inference_mode()
def recorded_forward(tower: InternViT, kernels: TowerKernels, tiles: torch.Tensor) -> RecordedCalls:
    """The parts of a forward; the addition and the norm between the last layer and the projector are none."""
    with RecordedCalls() as calls:
        calls.watch(tower, "embed", "embedding")
        for layer in tower.blocks[: tower.depth]:
            calls.watch(layer.attention.qkv, "forward", "qkv")
            calls.watch(layer.attention.output, "forward", "output")
            calls.watch(layer.mlp.linear2, "forward", "fc2")
        calls.watch(tower.projector, "forward", "projector")
        for owner, function in ((F, "linear"), (torch, "_scaled_mm"), (torch, "_addmm_activation")):
            calls.watch(owner, function, "product")
        names = {"attend": "attention", "add_and_norm": "norm", "linear_and_activate": "fc1_gelu"}
        wrapped = {function: calls.wrapped(getattr(kernels, function), name) for function, name in names.items()}
        tower(tiles, kernels=replace(kernels, **wrapped))
    return calls


def vision(
    config: CheckpointConfig, device: str, quantization: str, sizes: Sizes, repeater: Repeater, report: Report
) -> Account:
    """A forward of tiles on the device."""
    gpu = device == "cuda"
    kind, dtype = ("graph", "bfloat16") if gpu else ("torch", "float32")
    settings = VisionSettings(
        kind, sizes.tiles, dtype=dtype, device=device, quantization=quantization, random_weights=True
    )
    tower: Any = serving_tower(config, settings)
    tiles = torch.randint(0, 256, (sizes.tiles, *tower.unit_shape), dtype=torch.uint8, device=device)
    forward = tower.tuned(sizes.tiles, MeasuredChoices(choices_path(), graph_milliseconds)) if gpu else tower
    runner = GraphRunner(tower, [sizes.tiles], lambda _: forward)
    whole = repeater.cost(partial(runner.run, tiles))
    del runner
    calls = recorded_forward(tower, forward.keywords["kernels"] if gpu else PLAIN, tiles)
    report.title(f"forward of {sizes.tiles} tiles")
    account = account_of(calls, whole, repeater, report, {})
    calls.forget()
    for part, cost in account.parts.items():
        report.cost(f"vision.{part}", cost, "J/forward")
    report.cost("vision.whole", whole, "J/forward")
    report.figure("vision.explained", account.joules / whole.joules, "share")
    return account


# --- requests


def writers(decodes: Mapping[str, Cost], step: Account, forward: Account, sizes: Sizes, report: Report) -> None:
    """The same of long answers, and how many tokens a second there are if forwards, steps that read prompts and decode
    steps take turns, each alone on the GPU."""
    for name, ask in WRITERS.items():
        laps = ask.tiles / sizes.tiles, ask.prompt / sizes.tokens, ask.decoded / ask.together
        wholes = list(zip(laps, (forward.whole, step.whole, decodes[name])))
        seconds, joules = (sum(laps * getattr(cost, of) for laps, cost in wholes) for of in ("seconds", "joules"))
        rate = (ask.decoded + 1) / seconds
        print(f"{name} {joules:.3f} J a request, {rate:.0f} tok/s by wholes that take turns")
        report.figure(f"{name}.alone", joules, "J/request", tok_s=round(rate, 1))


def requests(steps: Mapping[str, Account], forward: Account, sizes: Sizes, kind: str, report: Report) -> None:
    """What a workload's request costs by its parts, by wholes that run alone, and through the server."""
    print("\nJ a request: parts, wholes alone, through the server (as recorded)")
    for name, ask in ASKS.items():
        tiles, tokens = ask.tiles / sizes.tiles, ask.tokens / sizes.tokens
        parts = tiles * forward.joules + tokens * steps[name].joules
        wholes = tiles * forward.whole.joules + tokens * steps[name].whole.joules
        served = newest().get(f"serve.{name}.{kind}.joules", {}).get("value")
        left = "not recorded" if served is None else f"{served:.2f}, of which the parts are {parts / served:.1%}"
        print(f"{name} {parts:8.3f} {wholes:8.3f}   {left}", flush=True)
        notes = {"parts": round(parts, 3), "served": served, "vision": round(tiles * forward.whole.joules, 3)}
        report.figure(f"{name}.alone", wholes, "J/request", **notes)


# --- beside the account


def attention(repeater: Repeater, report: Report) -> None:
    """Our prefill kernel and torch's on equal prompts."""
    for case in ATTENTIONS:
        data = bench_attention.Paged(case, bench_attention.copies_of(case))
        plan = bench_attention.default_plan(bench_attention.HEAD_DIM, bench_attention.DTYPE)
        report.title(f"attention, {case} tokens, a layer")
        ways: dict[str, list[Lap]] = {"ours": data.prefill(plan)} | dict(bench_attention.rivals(case))
        for name, laps in ways.items():
            try:
                cost = repeater.recorded(laps)
            except RuntimeError as refusal:
                print(f"{name}: refused, {str(refusal)[:80]!r}")
                continue
            report.row(name, cost)
            if name in ("ours", "sdpa cudnn"):
                report.cost(f"attention.{case}.{name.replace(' ', '_')}", cost.of_a_call, "J/layer")


def gate_up(text: TextConfig, repeater: Repeater, report: Report) -> None:
    """A layer's product and activation by the library and a kernel, and by the one that is both."""
    place = Place(repeater.device.type, torch.bfloat16 if repeater.device.type == "cuda" else torch.float32)
    kernels = layer_kernels(place.device)
    ways = {"library": lambda x, w: kernels.silu_and_multiply(F.linear(x, w)), "epilogue": kernels.gate_up_silu}
    weights = [place.weight(2 * text.intermediate_size, text.hidden_size) for _ in range(2)]  # no cache holds one
    for m in GATE_UP_ROWS:
        inputs = [place.rows(m, text.hidden_size) for _ in weights]
        report.title(f"gate_up and silu, {m} rows, a layer")
        for name, way in ways.items():
            cost = repeater.recorded([partial(way, *operands) for operands in zip(inputs, weights)])
            report.row(name, cost)
            report.cost(f"gate_up.m{m}.{name}", cost.of_a_call, "J/layer")


def measure(options: argparse.Namespace, sizes: Sizes, repeater: Repeater, report: Report) -> None:
    """All that was asked for."""
    config, fp8 = read_config(options.checkpoint), options.quantization == "fp8"
    whose = config, options.device, options.quantization, sizes
    chosen = options.accounts
    forward = steps = decodes = None
    language = Language(*whose) if {"prefill", "decode"} & set(chosen) else None
    if "attention" in chosen and not fp8:
        attention(repeater, report)
    if "gate_up" in chosen and not fp8:
        gate_up(config.text, repeater, report)
    if "vision" in chosen:
        forward = vision(*whose, repeater, report)
    if language and "prefill" in chosen:
        steps = prefill(language, repeater, report)
    if language and "decode" in chosen:
        decodes = decode(language, repeater, report)
    if forward and steps:
        requests(steps, forward, sizes, "fp8" if fp8 else "bf16", report)
    if forward and steps and decodes:
        writers(decodes, steps["W1"], forward, sizes, report)
    if "algorithms" in chosen:
        cublaslt.compare(cublaslt.shapes(config, sizes), fp8, torch.bfloat16, None, repeater, report)


def main(given: list[str] | None = None, sizes: Sizes = STANDARD) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accounts", nargs="+", choices=ACCOUNTS, default=ACCOUNTS[:-1])
    parser.add_argument("--quantization", choices=("checkpoint", "fp8"), default="checkpoint")
    parser.add_argument("--checkpoint", type=Path, default=SHAPE, help="another model; no figures for the record")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=1.2, help="that each part is measured for")
    parser.add_argument("--settle", type=float, default=0.5, help="that each part runs before")
    options = parser.parse_args(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench_joules: needs a GPU, and this machine has none; a trial without: --device cpu")
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stderr)  # what was chosen
    torch.manual_seed(4)
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    standard = options.checkpoint.resolve() == SHAPE and options.device == "cuda"
    prefix = f"{'' if standard else 'trial.'}joules{'.fp8' * (options.quantization == 'fp8')}"
    arguments = shlex.join(sys.argv[1:] if given is None else given)
    report = Report(prefix, "make bench NAME=joules" + f' ARGS="{arguments}"' * bool(arguments))
    began = time.monotonic()
    with GpuPower([gpu] if options.device == "cuda" else [], INTERVAL_S) as power:
        repeater = Repeater(power, torch.device(options.device), options.seconds, options.settle)
        measure(options, sizes, repeater, report)
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
