"""The stage's memory is known before it is used: shares, refusals at the start, honest estimates, one slab of rows."""

import random
import threading
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from tiny_checkpoints import Shape, hf_native

from tessera.errors import ConfigError
from tessera.models.registry import read_config
from tessera.settings.stages import VisionSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.memory import EmbeddingCache, RowBudget

HIDDEN = 4
ROW = HIDDEN * torch.bfloat16.itemsize


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


def test_a_checkpoint_loads_with_enough_and_not_with_less(config):
    settings = VisionSettings(runner="torch", infer_batch_size=2, threads=1, cache_bytes=1 << 20, memory_bytes=1 << 30)
    encoder = VisionEncoder.from_checkpoint(config, settings)
    side, rows = config.vision.image_size, config.vision.tokens_per_tile * config.text.hidden_size * 4
    held = encoder.runner.tower.weight_bytes + encoder.runner.activation_bytes(2) + 2 * side * side * 3 + (1 << 20)
    assert encoder.budget.capacity == (1 << 30) - held
    assert encoder.budget.bytes_per_unit == 2 * rows
    least = held + 2 * 2 * rows
    VisionEncoder.from_checkpoint(config, replace(settings, memory_bytes=least))
    with pytest.raises(ConfigError, match=r"of 2 tiles needs .* MiB \(weights .*, rows .* MiB\); raise gpu_memory"):
        VisionEncoder.from_checkpoint(config, replace(settings, memory_bytes=least - 1))
    assert VisionEncoder.from_checkpoint(config, replace(settings, memory_bytes=0)).budget.capacity is None


def cache_of(rows: int) -> EmbeddingCache:
    return EmbeddingCache(rows * ROW + ROW - 1, HIDDEN, torch.bfloat16)  # what is left over holds no row


def rows_of(number: int, count: int) -> torch.Tensor:
    return (number + torch.arange(count) / 8).to(torch.bfloat16)[:, None].expand(-1, HIDDEN)


def test_it_holds_what_a_plain_list_by_last_use_would_hold():
    """1,000 pictures of all sizes, of which one is too large and puts nothing out: a model in Python says which are
    kept. What is found outlives its place, and what is kept already is not kept twice."""
    dice, cache, room = random.Random(1), cache_of(40), 40
    expected: OrderedDict[int, torch.Tensor] = OrderedDict()
    earlier = []
    for _ in range(1000):
        key = dice.randrange(24)
        rows = rows_of(key, 1 + key % 13 if key else 41)
        found = cache.get(key)
        assert (found is not None) == (key in expected)
        cache.put(key, rows if found is None else rows + 1)
        if found is not None:
            expected.move_to_end(key)
            earlier.append((found, rows))
        elif len(rows) <= room:
            while sum(map(len, expected.values())) + len(rows) > room:
                expected.popitem(last=False)
            expected[key] = rows
        assert cache.used_bytes == ROW * sum(map(len, expected.values()))
    assert len(earlier) > 100 and all(torch.equal(found, rows) for found, rows in earlier)
