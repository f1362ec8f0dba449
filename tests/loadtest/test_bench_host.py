"""The bench of the engine's Python: the stand-in for a model takes the way of a GPU, and every part has its time."""

from __future__ import annotations

import cProfile

from bench.host import CHECKPOINT, PARTS, STEPS, NoModel, one_round

from tessera.prompt.tokenizer import Tokenizer


def test_every_part_of_a_decode_step_is_timed():
    runner = NoModel.small()
    seen = cProfile.Profile()
    seconds = one_round(runner, Tokenizer.from_folder(CHECKPOINT), 3, seen)
    assert len(seconds) == len(PARTS) and min(seconds) > 0
    assert runner.graph_steps >= STEPS  # as on a GPU
    assert {"schedule", "pack", "greedy"} <= {getattr(entry.code, "co_name", "") for entry in seen.getstats()}
