"""Graphs by number of tiles: filled up to the next, split above the largest; on the CPU, where nothing is recorded."""

import numpy as np
import pytest
import torch
from tiny_checkpoints import Shape, hf_native

from tessera.models.registry import read_config
from tessera.models.tower import load_tower
from tessera.vision.torch_runner import GraphRunner, TorchRunner, bucket_sizes


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    return load_tower(read_config(hf_native(tmp_path_factory.mktemp("tiny"), Shape(image_size=56, patch_size=14))))


def tiles(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 56, 56, 3), dtype=np.uint8)


class Recorded:
    """A tower that keeps the sizes of its forwards."""

    def __init__(self, tower):
        self._tower = tower
        self.sizes = []

    def __getattr__(self, name):
        return getattr(self._tower, name)

    def __call__(self, pixels):
        self.sizes.append(len(pixels))
        return self._tower(pixels)


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 16, 32, 50])
def test_buckets_reach_the_largest_and_waste_less_than_a_third(largest):
    sizes = bucket_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest
    for count in range(1, largest + 1):
        size = next(size for size in sizes if size >= count)
        assert (size - count) / size < 1 / 3


@pytest.mark.parametrize(
    ("count", "forwards"), [(1, [1]), (2, [2]), (3, [4]), (4, [4]), (5, [6]), (6, [6]), (7, [6, 1]), (15, [6, 6, 4])]
)
def test_a_forward_is_filled_up_to_the_next_size_and_split_above_the_largest(tower, count, forwards):
    recorded = Recorded(tower)
    runner = GraphRunner(recorded, bucket_sizes(6))
    recorded.sizes.clear()  # what recording ran
    rows = runner.run(tiles(count))
    assert recorded.sizes == forwards
    torch.testing.assert_close(rows, TorchRunner(tower).run(tiles(count)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("sizes", "beside"), [([1, 2, 4, 6], 4), ([1, 6], 1), ([1, 2, 4], 0), ([3], 0), ([6, 8], 0)])
def test_the_smallest_may_run_beside_larger_ones_and_share_no_pixels_with_them(tower, sizes, beside):
    runner = GraphRunner(tower, sizes)
    assert runner.beside == beside
    memory = {size: runner._pixels[size].untyped_storage().data_ptr() for size in sizes}
    assert len({memory[size] for size in sizes if size <= 4}) <= 1 and len(set(memory.values())) == (2 if beside else 1)
    for count in (1, sizes[-1], 1):
        torch.testing.assert_close(runner.run(tiles(count)), TorchRunner(tower).run(tiles(count)), atol=1e-5, rtol=1e-5)


def test_rows_are_the_callers_to_keep(tower):
    runner = GraphRunner(tower, [4])
    first = runner.run(tiles(4))
    kept = first.clone()
    second = runner.run(torch.from_numpy(tiles(2, seed=1)))
    assert torch.equal(first, kept)
    assert second.shape == (len(first) // 2, first.shape[1]) and not torch.equal(second, first[: len(second)])
