"""The stage's memory is known before it is used: shares, refusals at the start, and honest estimates."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import Shape, hf_native

from tessera.errors import ConfigError
from tessera.models.registry import read_config
from tessera.models.tower import load_tower
from tessera.settings.stages import VisionSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.memory import RowBudget, row_budget
from tessera.vision.runner import weight_bytes

DEFAULT = Path(__file__).resolve().parents[2] / "build" / "default_model" / "checkpoint"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    hf_native(folder, Shape())
    return read_config(folder)


def test_waves_are_runs_of_neighbours_that_fit():
    budget = RowBudget(10, 50)
    assert list(map(list, budget.waves([2, 3, 1, 0, 4, 5, 0]))) == [[0, 1], [2, 3, 4], [5, 6]]
    assert list(budget.waves([])) == []
    assert list(map(list, RowBudget(10).waves([100, 200]))) == [[0, 1]]


def test_a_reservation_waits_for_what_is_given_back():
    budget = RowBudget(10, 50)
    budget.reserve(4)
    reserved = threading.Event()
    thread = threading.Thread(target=lambda: (budget.reserve(2), reserved.set()))
    thread.start()
    assert not reserved.wait(0.05)
    budget.give_back(1)
    assert reserved.wait(5) and budget.used_bytes == 50
    thread.join()


def test_a_share_too_small_for_one_forward_is_a_configuration_error():
    parts = {"weights": 30 << 20, "cache": 20 << 20}
    assert row_budget(0, parts, 1 << 20, 8).capacity is None
    assert row_budget(60 << 20, parts, 1 << 20, 8).capacity == 10 << 20
    with pytest.raises(ConfigError, match=r"is 57.0 MiB; a forward of 8 tiles needs 58.0 MiB \(weights 30.0 MiB, .*"):
        row_budget(57 << 20, parts, 1 << 20, 8)


def test_a_checkpoint_loads_with_enough_and_not_with_less(config):
    settings = VisionSettings(runner="torch", infer_batch_size=2, cache_bytes=1 << 20, memory_bytes=1 << 30)
    encoder = VisionEncoder.from_checkpoint(config, settings)
    side, rows = config.vision.image_size, config.vision.tokens_per_tile * config.text.hidden_size * 4
    held = weight_bytes(config, settings) + encoder.runner.activation_bytes(2) + 2 * side * side * 3 + (1 << 20)
    assert encoder.budget.capacity == (1 << 30) - held
    assert encoder.budget.bytes_per_unit == 2 * rows
    least = held + 2 * 2 * rows
    VisionEncoder.from_checkpoint(config, replace(settings, memory_bytes=least))
    with pytest.raises(ConfigError, match="raise gpu_memory"):
        VisionEncoder.from_checkpoint(config, replace(settings, memory_bytes=least - 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_counted_from_shapes_alone(config, dtype):
    tower = load_tower(config, getattr(torch, dtype))
    held = sum(parameter.nbytes for parameter in tower.parameters())
    counted = weight_bytes(config, VisionSettings(runner="torch", dtype=dtype))
    # Layer scales are folded away after loading.
    assert held <= counted <= 1.01 * held
