"""What the engine's Python costs a decoded token (`make bench NAME=host`): on the CPU, with no model behind it.

Greedy answers to texts of 320 to 1,500 tokens, no two alike, for 10 to 256 sequences at once. CPU microseconds a token,
the best of five rounds: `step` is what the engine's thread does (planning, the inputs of a decode graph, taking its
tokens), `tell` sends what came of it, and `text` is made of it in the stage's process. What a GPU adds (pinned copies,
events, the graph's launch) is not in them.

    python loadtest/bench host --profile
"""

from __future__ import annotations

import argparse
import cProfile
import pickle
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import figures
import numpy as np
import torch

from bench.engine_load import check
from tessera.engine.engine import Engine
from tessera.engine.execution.batch_inputs import PackedBatch
from tessera.engine.execution.model_runner import ModelRunner, load_model
from tessera.engine.execution.step_graphs import DecodeGraphs, graph_sizes
from tessera.engine.rendering import Answers
from tessera.engine.scheduling.scheduler import ScheduledBatch
from tessera.engine.sequence import Request
from tessera.models.registry import read_config
from tessera.prompt.sampling import SamplingParameters
from tessera.prompt.tokenizer import Tokenizer
from tessera.settings.stages import EngineConfig

CHECKPOINT = figures.ROOT / "build" / "default_model" / "checkpoint"
RUNNING = (10, 64, 128, 256)
PARTS = ("step", "tell", "text")
STEPS, ROUNDS, MOST_CONTEXT = 100, 5, 2048
CONFIG = EngineConfig(weights="random", max_sequences=256, max_batched_tokens=8192, kv_cache_bytes=1 << 30)


class NoModel(ModelRunner):
    """Answers token 0 at once, after all that a runner on a GPU does on the host for a step."""

    @classmethod
    def small(cls) -> ModelRunner:
        runner = cls.of_model(load_model(read_config(CHECKPOINT), CONFIG), CONFIG, MOST_CONTEXT)
        sizes, most_blocks = graph_sizes(CONFIG.max_sequences), MOST_CONTEXT // CONFIG.block_size
        graphs = DecodeGraphs(runner._model, runner._attention, sizes, most_blocks, runner._last_sampled)
        graphs._greedy.replay = lambda size: None  # type: ignore[method-assign]
        runner._graphs, runner.async_launch = graphs, True
        return runner

    def _forward(self, packed: PackedBatch, batch: ScheduledBatch) -> torch.Tensor:
        return torch.zeros(len(packed.sample_rows), self.vocab_size)


def one_round(
    runner: ModelRunner, tokenizer: Tokenizer, running: int, profile: cProfile.Profile | None = None
) -> list[float]:
    """CPU seconds a token of each of PARTS; ``profile`` sees the steps."""
    engine = Engine(runner, tokenizer, CONFIG, MOST_CONTEXT, ())
    answers = Answers(tokenizer, engine.cancel)
    random, none = np.random.default_rng(running), np.zeros((0, 2), np.int32)
    # No answer ends before the last prompt has begun and the steps are over.
    sampling = SamplingParameters(max_tokens=4 * STEPS, ignore_eos=True)
    for length in random.integers(320, 1500, running):
        ids = random.integers(0, runner.vocab_size, length, dtype=np.int32)
        request = Request("", ids, none, None, none.reshape(-1), sampling)
        answers.add(request, lambda event: None)
        engine.submit(request)
    begun = 0
    while begun < running:
        progress = engine.step()
        answers.take(progress)
        begun = len(progress.tokens)

    seconds = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, work: Callable[..., Any], *arguments: Any) -> Any:
        before = time.thread_time()
        result = work(*arguments)
        seconds[part] += time.thread_time() - before
        return result

    for _ in range(STEPS):
        with profile or nullcontext():
            progress = timed("step", engine.step)
        check(progress)
        message = timed("tell", pickle.dumps, progress, pickle.HIGHEST_PROTOCOL)
        timed("text", lambda message=message: answers.take(pickle.loads(message)))
    return [spent / STEPS / running for spent in seconds.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="*", default=RUNNING, help="sequences at once")
    parser.add_argument("--profile", action="store_true", help="also print where the steps' time goes")
    arguments = parser.parse_args()
    runner, tokenizer = NoModel.small(), Tokenizer.from_folder(CHECKPOINT)
    for running in arguments.running:
        best = np.min([one_round(runner, tokenizer, running) for _ in range(ROUNDS)], axis=0)
        for part, spent in zip(PARTS, 1e6 * best):
            figures.emit(f"host.{part}.b{running}", round(spent, 2), "us/token", "make bench NAME=host")
        if arguments.profile:
            with cProfile.Profile() as profile:
                profile.disable()
                one_round(runner, tokenizer, running, profile)
            profile.print_stats("tottime")


if __name__ == "__main__":
    main()
