"""What a workload's requests cost without a server, of any shape (`make bench NAME=account`): random weights, one GPU,
this process.

Forwards of the tower, steps that read prompts and decode steps run one kind after the other, each alone and as large as
they can be. A request is its share of a forward, its prompt's share of a step and, where answers are long, its tokens'
share of decode steps of as many sequences as are in flight. `account.<workload>.<shape>.<form>.req_s`, or `tok_s`, is
the rate if they take turns, `joules` what a request draws. Short answers are the tower and the prompt alone. Figures of
the server to hold beside it are `make bench NAME=load`'s, and with `--ceiling` the load's own limit. Of decode steps
`bandwidth` is what share of an H200's copy speed they read weights, keys and values at, of experts those that see a
token.

    python loadtest/bench account --workloads W7a W7b W7c --checkpoint loadtest/shapes/mineru25-shape --gpus 0
    python loadtest/bench account --workloads W7c --gpus ""                   on the CPU, a trial: `trial.account.*`

On an H200 an 8B shape takes about a minute to load and some 10 s a workload.
"""

import argparse
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import figures
import numpy as np
import torch
from gpu_power import Draw, GpuPower
from serving import DEFAULT_CHECKPOINT
from workloads import WORKLOADS, Workload, picture, shape_name

from tessera.checkpoint.config import CheckpointConfig
from tessera.engine.engine import Engine
from tessera.engine.process.messages import Progress
from tessera.engine.sequence import Request
from tessera.kernels import fast
from tessera.kernels.operands import Routing
from tessera.linear.experts import Experts
from tessera.models.registry import family_for, read_config
from tessera.models.tower import unfilled_tower
from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest
from tessera.prompt.sampling import SamplingParameters
from tessera.settings.stages import EngineConfig, VisionSettings
from tessera.vision.runner import make_runner

KINDS = {"bf16": "checkpoint", "fp8": "fp8"}
STEPS = 12
INTERVAL_S = 0.02
GPU_BATCH, CPU_BATCH = 16, 4  # visual_infer_batch_size
COPY_BYTES_S = 4.28e12  # of one H200, measured
ROWS_STD = 0.02  # as text embeddings have it


class Cost(NamedTuple):
    """Of one forward, token or step: seconds, and what the GPU drew meanwhile."""

    seconds: float
    draw: Draw | None

    @property
    def joules(self) -> float:
        return self.seconds * self.draw.watts if self.draw else math.nan


class Prompts:
    """Requests as the workload's, which share no block of tokens; the rows are one picture's."""

    _random, _numbers = np.random.default_rng(0), itertools.count(1)  # of all: what was read once is cached

    def __init__(self, prepared: Prepared, config: CheckpointConfig, device: str) -> None:
        self._like, self._vocab_size = prepared, config.text.vocab_size
        rows = torch.empty(int(prepared.spans[:, 1].sum()), unfilled_tower(config).row_shape[1], device=device)
        self._rows = rows.normal_(0, ROWS_STD).to(torch.bfloat16 if device == "cuda" else torch.float32)

    @property
    def tokens(self) -> int:
        return len(self._like.input_ids)

    def request(self, max_tokens: int) -> Request:
        number = next(self._numbers)
        return Request(
            str(number),
            self._random.integers(0, self._vocab_size, self.tokens, dtype=np.int32),
            self._like.spans,
            self._rows,
            np.full_like(self._like.digest, number),
            SamplingParameters(max_tokens=max_tokens, ignore_eos=True),
            positions=self._like.positions,
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


def prefill(engine: Engine, prompts: Prompts, warm_up: int, steps: int, budget: int, waiting: int) -> Prefill:
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


def decode_stamps(engine: Engine, prompts: Prompts, batch: int, skip: int, steps: int, max_tokens: int) -> list[float]:
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


def forward_cost(config: CheckpointConfig, prepared: Prepared, settings: VisionSettings, seconds: float) -> Cost:
    """Of one picture, in forwards of as many as the vision stage takes."""
    runner, device = make_runner(config, settings), torch.device(settings.device)
    most, cost = settings.infer_batch_size * runner.tower.batch_unit, sum(plan.cost for plan in prepared.plans)
    most *= runner.at_once
    pixels = torch.from_numpy(prepared.pixels.reshape(-1, *family_for(config).unit_shape)).to(device)
    if runner.tower.splits:  # forwards are full, of the tiles of whichever pictures
        pixels, wires, count = pixels.repeat(-(-most // cost), 1, 1, 1)[:most], [], most / cost
    else:
        count = max(1, most // cost)
        pixels, wires = torch.cat([pixels] * count), [plan.wire for plan in prepared.plans] * count
    lap = repeated(lambda: runner.run(pixels, wires), device, seconds)
    return Cost(lap.seconds / count, lap.draw)


def repeated(call: Callable[[], object], device: torch.device, seconds: float) -> Cost:
    """Of a call, which a GPU begins as the one before ends."""
    waiting: list[torch.cuda.Event] = []

    def once() -> None:
        call()
        if device.type == "cuda":
            waiting.append(torch.cuda.Event())
            waiting[-1].record()
            if len(waiting) > 2:
                waiting.pop(0).synchronize()

    def lap(least: float) -> tuple[int, float, float]:
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < least or not count:
            once()
            count += 1
        for event in waiting:
            event.synchronize()
        waiting.clear()
        return count, began, time.perf_counter()

    lap(seconds / 2)  # until clocks and watts stand
    with GpuPower(gpus_of(device.type), INTERVAL_S) as power:
        count, began, ended = lap(seconds)
    return Cost((ended - began) / count, power.between(began, ended))


def gpus_of(device: str) -> list[str]:
    """The one that this process sees, by its number for NVML."""
    return [os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]] if device == "cuda" else []


def token_cost(engine: Engine, prompts: Prompts, config: EngineConfig, seconds: float) -> Cost:
    """Of a prompt's token, in steps that are full of prompts."""
    full = config.max_batched_tokens, config.max_sequences
    first = prefill(engine, prompts, 2, 2, *full)
    steps = max(STEPS, math.ceil(seconds * first.tokens_per_s / config.max_batched_tokens))
    with GpuPower(gpus_of(config.device), INTERVAL_S) as power:
        found = prefill(engine, prompts, max(2, steps // 2), steps, *full)
    return Cost(1 / found.tokens_per_s, power.between(found.began, found.ended))


def step_cost(engine: Engine, prompts: Prompts, workload: Workload, device: str) -> Cost:
    """Of a decode step of as many sequences as are in flight, over their answers: a GPU's counter of joules is slow."""
    skip = workload.tokens // 16
    steps = workload.tokens - 2 * skip
    with GpuPower(gpus_of(device), INTERVAL_S / 2) as power:
        stamps = decode_stamps(engine, prompts, workload.concurrency, skip, steps, workload.tokens)
    each = [after - before for before, after in itertools.pairwise(stamps)]
    return Cost(median(each), power.between(stamps[0], stamps[-1]))


class TouchedExperts:
    """How many experts of all layers the tokens of a decode step see: it holds on to where graphs write the routing."""

    def __init__(self) -> None:
        self._bounds: dict[int, list[torch.Tensor]] = {}
        self._route, fast.route = fast.route, self._keep  # type: ignore[assignment]

    def _keep(self, logits: torch.Tensor, picked: int, normalize: bool) -> Routing:
        routing = self._route(logits, picked, normalize)
        if torch.cuda.is_current_stream_capturing():
            self._bounds.setdefault(len(logits), []).append(routing.bounds)
        return routing

    def share(self, batch: int, layers: int) -> float:
        """Of all experts, in the last step of ``batch`` sequences."""
        bounds = self._bounds[min(rows for rows in self._bounds if rows >= batch)][:layers]
        return float(torch.stack(bounds).diff().gt(0).float().mean())


def step_bytes(engine: Engine, config: CheckpointConfig, prompts: Prompts, workload: Workload, touched: float) -> float:
    """What such a step as :func:`step_cost`'s must read: ``touched`` is the share of the experts."""
    model, text = engine._runner._model, config.text
    linears = {linear: sum(buffer.nbytes for buffer in linear.buffers()) for linear in model.places()}
    weights = sum(size * (touched if isinstance(linear, Experts) else 1) for linear, size in linears.items())
    if text.tie_word_embeddings:
        weights += model.embedding.weight.nbytes
    context = prompts.tokens + workload.tokens // 2
    kv_bytes = 2 * 2 * text.num_key_value_heads * text.head_dim * text.num_hidden_layers
    return weights + workload.concurrency * context * kv_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["W7a", "W7b", "W7c"], choices=sorted(WORKLOADS))
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_CHECKPOINT)
    parser.add_argument("--gpus", default="0", help="the number of one; empty for the CPU, a trial")
    parser.add_argument("--form", choices=KINDS, default="bf16")
    parser.add_argument("--seconds", type=float, default=1.5, help="that each kind is measured for")
    options = parser.parse_args()
    device = "cuda" if options.gpus else "cpu"
    if options.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpus  # before anything asks for it
        if not torch.cuda.is_available():
            raise SystemExit('account: needs a GPU, and this machine has none; a trial without: --gpus ""')
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stderr)  # what was chosen
    torch.manual_seed(4)
    config, preprocessor = read_config(options.checkpoint), Preprocessor.from_checkpoint(options.checkpoint)
    asked = [WORKLOADS[name] for name in options.workloads]
    prepared = {workload.name: prepare(preprocessor, workload) for workload in asked}
    kind = KINDS[options.form]
    vision = VisionSettings("onnx", CPU_BATCH, random_weights=True)
    language = EngineConfig(weights="random", quantization=kind, max_batched_tokens=2048, max_sequences=64)
    if device == "cuda":
        vision = VisionSettings(
            "graph", GPU_BATCH, dtype="bfloat16", quantization=kind, device=device, random_weights=True
        )
        language = EngineConfig(device=device, weights="random", quantization=kind)
    # The tower is gone when the engine takes what is left of the memory.
    forwards = {name: forward_cost(config, each, vision, options.seconds) for name, each in prepared.items()}
    torch.cuda.empty_cache()
    touched = TouchedExperts() if config.text.experts and device == "cuda" else None
    engine = Engine.from_checkpoint(options.checkpoint, language)
    for workload in asked:
        prompts = Prompts(prepared[workload.name], config, device)
        token = token_cost(engine, prompts, language, options.seconds)
        bandwidth = {}
        parts = {"forward": (forwards[workload.name], 1.0), "prefill": (token, float(prompts.tokens))}
        if workload.streamed:
            step = step_cost(engine, prompts, workload, device)
            parts["decode"] = step, (workload.tokens - 1) / workload.concurrency
            share = touched.share(workload.concurrency, config.text.num_hidden_layers) if touched else 1.0
            read = step_bytes(engine, config, prompts, workload, share)
            bandwidth = {"decode_gb": read / 1e9, "bandwidth": read / step.seconds / COPY_BYTES_S, "touched": share}
        whose = f"{shape_name(options.checkpoint)}.{options.form}"
        report(workload, parts, whose, device, {"prompt_tokens": prompts.tokens, **bandwidth})
    return 0


def prepare(preprocessor: Preprocessor, workload: Workload) -> Prepared:
    """A request of the workload, as it is asked."""
    prompt = workload.question(workload.prompts[0])
    tiles = {} if workload.max_tiles is None else {"tile_policy": {"max_tiles": workload.max_tiles}}
    data = picture(workload.width, workload.height, seed=7)
    return preprocessor(PreprocessRequest(text=prompt, images=[data], **tiles))


def report(
    workload: Workload, parts: dict[str, tuple[Cost, float]], whose: str, device: str, notes: dict[str, float]
) -> None:
    """Emits the account of a request: of each part its cost, and how many of them a request takes."""
    name = "trial." * (device == "cpu") + f"account.{workload.name}.{whose}"
    seconds = {part: cost.seconds * times for part, (cost, times) in parts.items()}
    about: dict[str, object] = {f"{part}_ms": round(1e3 * value, 3) for part, value in seconds.items()}
    drawn = {part: cost.joules * times for part, (cost, times) in parts.items() if cost.draw}
    about |= {f"{part}_watts": round(cost.draw.watts) for part, (cost, _) in parts.items() if cost.draw}
    about |= {f"{part}_mhz": round(cost.draw.mhz) for part, (cost, _) in parts.items() if cost.draw}
    about |= {name: round(value, 4) for name, value in notes.items()}
    rate = 1 / sum(seconds.values())
    if workload.streamed:
        figures.emit(f"{name}.tok_s", round(rate * workload.tokens, 1), "tok/s", **about)
    else:
        figures.emit(f"{name}.req_s", round(rate, 3), "req/s", **about)
    if len(drawn) == len(parts):
        each = {f"{part}_joules": round(value, 3) for part, value in drawn.items()}
        figures.emit(f"{name}.joules", round(sum(drawn.values()), 3), "J/request", **each)
