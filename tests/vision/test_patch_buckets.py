"""Pictures of any size, filled up to one of few costs by a picture that nobody reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_qwen2_vl_tower import config_of, groups, picture, wires

from tessera.vision.runners.patch_buckets import bucket_sizes, filled_up
from tessera.vision.towers.tower import load_tower


@pytest.mark.parametrize("largest", [1, 64, 65, 256, 1000, 8192])
def test_buckets_reach_the_largest_and_waste_less_than_a_fifth(largest: int) -> None:
    sizes = bucket_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest and len(sizes) < 25
    for cost in range(65, largest + 1):
        filled = filled_up([(1, 2, 2 * cost)], 2, sizes)
        more = sum(width // 2 for _, _, width in filled[1:])
        assert cost + more in sizes and more < (cost + more) / 5


def test_what_fills_up_changes_no_rows(tmp_path: Path) -> None:
    tower, grids = load_tower(config_of(tmp_path), random_weights=True), [(6, 10), (4, 4), (2, 8)]
    pixels = torch.cat([groups(picture(grid)) for grid in grids])
    filled = filled_up(wires(grids), 2, bucket_sizes(100))
    assert filled == [*wires(grids), (1, 2, 82)]
    noise = torch.randint(0, 256, (41, *tower.unit_shape), generator=torch.Generator().manual_seed(0))
    rows = tower(torch.cat((pixels, noise.to(torch.uint8))), filled)
    assert rows.shape == (64, 48)
    torch.testing.assert_close(rows[:23], tower(pixels, wires(grids)), atol=1e-5, rtol=1e-5)


def test_what_fits_needs_nothing_and_what_is_too_large_has_no_bucket() -> None:
    assert filled_up([(1, 16, 16)], 2, [64, 80]) == [(1, 16, 16)]
    assert filled_up([(1, 2, 164)], 2, [64, 80]) is None
