"""The engine alone on one GPU, in this process (`make bench NAME=engine`): a shape with random weights.

Requests are those of W1: 316 prompt tokens, 256 of them rows of a picture that are given, no two alike. Prefill (full
steps) and decode (of 1, 10 and 64 sequences, with a context of about 450 tokens) are stepped one by one. Beside a
figure of InternVL3-8B's shape in bf16 stands its ceiling on one H200.

    python loadtest/bench engine --parts prefill decode --set max_batched_tokens=4096
    python loadtest/bench engine --checkpoint build/default_model/checkpoint --set device=cpu      a trial without a GPU

Figures of another shape, machine or setting are `trial.engine.*`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import figures
import numpy as np
import torch

from tessera.checkpoint.config import TextConfig
from tessera.engine.engine import Engine
from tessera.engine.process.messages import Progress
from tessera.engine.sequence import Request
from tessera.models.registry import read_config
from tessera.prompt.sampling import SamplingParameters
from tessera.settings.stages import EngineConfig

SHAPE = figures.ROOT / "loadtest" / "shapes" / "internvl3-8b-shape"
# One H200, measured; for this shape in bf16.
PREFILL_TOKENS_S = 48_200.0
COPY_BYTES_S = 4.28e12

PARTS = ("prefill", "decode")
BATCHES = (1, 10, 64)
DECODE_TOKENS = 256
DECODE_SKIP, DECODE_STEPS = 100, 64  # tokens before measuring, steps that are measured
PREFILL_WARM_UP, PREFILL_STEPS = 3, 12
REPEATS = 3

PROMPT_TOKENS = 316
PICTURE_ROWS = 256
PICTURE_START = 12
ROWS_STD = 0.02  # as text embeddings have it
PICTURES = 64


@dataclass(frozen=True)
class Shape:
    """A text model in numbers: parameters of its layers' and its head's matrices, and KV bytes a token, in bf16."""

    body: int
    head: int
    kv_bytes: int

    @classmethod
    def of(cls, text: TextConfig) -> Shape:
        queries, keys = (n * text.head_dim for n in (text.num_attention_heads, text.num_key_value_heads))
        layer = text.hidden_size * (2 * queries + 2 * keys + 3 * text.intermediate_size)
        layers = text.num_hidden_layers
        return cls(layers * layer, text.hidden_size * text.vocab_size, 2 * 2 * keys * layers)

    def ceilings(self) -> dict[str, float]:
        """The best each figure could be on one H200: of decode, every matrix and all keys and values once, at copy
        speed."""
        found = {"prefill.tokens_per_s": PREFILL_TOKENS_S, "prefill.tflops": PREFILL_TOKENS_S * 2 * self.body / 1e12}
        for batch in BATCHES:
            cached = batch * (PROMPT_TOKENS + DECODE_SKIP + DECODE_STEPS // 2) * self.kv_bytes
            found[f"decode.b{batch}.ms"] = 1e3 * (2 * (self.body + self.head) + cached) / COPY_BYTES_S
        return found


class Asking(Protocol):
    """Makes requests of ``tokens`` tokens each."""

    @property
    def tokens(self) -> int: ...

    def request(self, max_tokens: int) -> Request: ...


class Prompts:
    """Makes requests with the picture's rows given; no two have a block of tokens in common.

    The rows themselves (bfloat16 [PICTURE_ROWS, hidden], on ``device``) repeat after 64 requests, the digests never do.
    """

    tokens = PROMPT_TOKENS

    def __init__(self, hidden_size: int, vocab_size: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        rows = torch.empty(PICTURES, PICTURE_ROWS, hidden_size, dtype=torch.bfloat16, device=device)
        self._rows = itertools.cycle(rows.normal_(0, ROWS_STD, generator=generator))
        self._random, self._vocab_size, self._numbers = np.random.default_rng(0), vocab_size, itertools.count()

    def request(self, max_tokens: int) -> Request:
        """A greedy request whose answer has exactly ``max_tokens`` tokens."""
        number = next(self._numbers)
        return Request(
            request_id=str(number),
            input_ids=self._random.integers(0, self._vocab_size, PROMPT_TOKENS, dtype=np.int32),
            spans=np.array([[PICTURE_START, PICTURE_ROWS]], np.int32),
            embeddings=next(self._rows),
            digest=np.array([number, PROMPT_TOKENS], np.int64),
            sampling=SamplingParameters(max_tokens=max_tokens, ignore_eos=True),
        )


def check(progress: Progress) -> None:
    """Raises RuntimeError for a request that ended otherwise than by its length: it would spoil the figure."""
    for end in progress.ends:
        if end.reason != "length":
            raise RuntimeError(f"request {end.number} ended by {end.reason}: {end.error}")


class Prefill(NamedTuple):
    """Steps that read prompts, and when they began and ended (time.perf_counter())."""

    tokens_per_s: float
    step_tokens: float
    began: float
    ended: float


def prefill(engine: Engine, prompts: Asking, warm_up: int, steps: int, budget: int, waiting: int) -> Prefill:
    """``steps`` steps after ``warm_up`` ones.

    All steps are prefill of single-token requests, of which ``waiting`` are kept under way, so that each step has its
    ``budget`` of tokens full.
    """
    # Two steps more than are measured: the last one must be full, and the one planned while it runs.
    left = -(-(warm_up + steps + 2) * budget // prompts.tokens)
    under_way = 0
    marks: list[tuple[float, int]] = []
    while left or engine.has_work():
        fresh = min(left, waiting - under_way)
        for _ in range(fresh):
            engine.submit(prompts.request(max_tokens=1))
        left, under_way = left - fresh, under_way + fresh
        progress = engine.step()
        marks.append((time.perf_counter(), engine.metrics.computed_tokens))
        check(progress)
        under_way -= len(progress.ends)
    (begun, before), (ended, after) = marks[warm_up], marks[warm_up + steps]
    return Prefill((after - before) / (ended - begun), (after - before) / steps, begun, ended)


def decode_step_s(engine: Engine, prompts: Asking, batch: int, skip: int, steps: int, max_tokens: int) -> list[float]:
    """Seconds from one step's tokens to the next's, of ``steps`` steps after the batch has ``skip`` tokens each."""
    stamps = decode_stamps(engine, prompts, batch, skip, steps, max_tokens)
    return [after - before for before, after in itertools.pairwise(stamps)]


def decode_stamps(engine: Engine, prompts: Asking, batch: int, skip: int, steps: int, max_tokens: int) -> list[float]:
    """When the tokens of these steps, and of the one before, were there (time.perf_counter())."""
    requests = [prompts.request(max_tokens) for _ in range(batch)]
    for request in requests:
        engine.submit(request)
    tokens = 0
    stamps: list[float] = []
    while engine.has_work():
        progress = engine.step()
        now = time.perf_counter()
        got = len(progress.tokens)
        tokens += got
        if not got or tokens < skip * batch or len(stamps) > steps:
            continue
        check(progress)
        if got != batch:
            raise RuntimeError(f"a step of {batch} decoding requests gave {got} tokens")
        stamps.append(now)
        if len(stamps) > steps:
            for request in requests:
                engine.cancel(request.number)
    if len(stamps) <= steps:
        raise RuntimeError(f"{max_tokens} tokens are too few for {skip} steps to skip and {steps} to measure")
    return stamps


def engine_config(settings: list[str]) -> EngineConfig:
    """What the bench asks for, overridden by ``NAME=VALUE`` settings; a VALUE is JSON or else a string."""
    values: dict[str, Any] = {"device": "cuda", "weights": "random"}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in {field.name for field in fields(EngineConfig)}:
            raise SystemExit(f"engine: EngineConfig has no field {name!r}")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    config = EngineConfig(**values)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("engine: needs a GPU, and this machine has none; a trial without: --set device=cpu")
    return config


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", dest="settings", help="of EngineConfig")
    parser.add_argument("--checkpoint", type=Path, default=SHAPE)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stderr)  # what the engine chose
    config, text = engine_config(options.settings), read_config(options.checkpoint).text
    recorded = options.checkpoint.resolve() == SHAPE and config.device.startswith("cuda") and not options.settings
    ceilings = Shape.of(text).ceilings() if recorded else {}

    def emit(name: str, value: float, unit: str, **notes: Any) -> None:
        metric = "trial." * (not recorded) + f"engine.{name}"
        figures.emit(metric, round(value, 4), unit, ceiling=ceilings.get(name), **notes)

    began = time.perf_counter()
    engine = Engine.from_checkpoint(options.checkpoint, config)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    emit("startup_s", time.perf_counter() - began, "s")
    prompts = Prompts(text.row_size, text.vocab_size, config.device)
    if "prefill" in options.parts:
        full = (PREFILL_WARM_UP, PREFILL_STEPS, config.max_batched_tokens, config.max_sequences)
        runs = [prefill(engine, prompts, *full) for _ in range(REPEATS)]
        rate, step = median(run.tokens_per_s for run in runs), median(run.step_tokens for run in runs)
        emit("prefill.tokens_per_s", rate, "tokens/s", step_tokens=round(step))
        emit("prefill.tflops", rate * 2 * Shape.of(text).body / 1e12, "TFLOP/s")
    for batch in BATCHES if "decode" in options.parts else ():
        given = (batch, DECODE_SKIP, DECODE_STEPS, DECODE_TOKENS)
        steps = [decode_step_s(engine, prompts, *given) for _ in range(REPEATS)]
        slowest = round(1e3 * max(map(max, steps)), 3)
        emit(f"decode.b{batch}.ms", 1e3 * median(map(median, steps)), "ms", slowest_ms=slowest)
    return 0
