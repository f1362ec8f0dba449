"""The slab's stretches never overlap, are found again when they are free, and are counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera.engine.process.embedding_pool import EmbeddingPool, Places, rows_at

CAPACITY = 1 << 14


@given(st.lists(st.one_of(st.integers(0, 5000), st.just(None)), max_size=60), st.randoms(use_true_random=False))
def test_places_never_overlap_and_are_exact(steps, random):
    places, taken = Places(CAPACITY), {}
    for size in steps:
        if size is not None:
            start = places.take(size)
            if start is None:
                continue
            assert start + size <= CAPACITY
            assert all(start >= other + length or start + size <= other for other, length in taken.items())
            assert start not in taken
            taken[start] = size
        elif taken:
            start = random.choice(sorted(taken))
            del taken[start]
            places.give_back(start)
        assert places.used >= sum(taken.values())
    for start in taken:
        places.give_back(start)
    assert places.used == 0
    assert places.most_used <= CAPACITY
    assert places.take(CAPACITY) == 0 and places.most_used == CAPACITY


def test_a_full_slab_has_no_place_and_a_gap_is_used_again():
    places = Places(3 * 512)
    assert [places.take(512) for _ in range(4)] == [0, 512, 1024, None]
    places.give_back(512)
    assert places.take(513) is None
    assert places.take(100) == 512
    with pytest.raises(AssertionError, match="byte 256"):
        places.give_back(256)


def test_rows_at_a_place_are_a_view_of_the_slab():
    slab = torch.zeros(4096, dtype=torch.uint8)
    rows_at(slab, 512, (3, 4), torch.bfloat16)[:] = 1.0
    assert rows_at(slab, 512, (3, 4), torch.bfloat16).sum() == 12
    assert not slab[:512].any() and not slab[512 + 24 :].any()
    for rows in (0, 3):  # what place_of reads; an empty view has no pointer
        view = rows_at(slab, 512, (rows, 4), torch.bfloat16)
        assert view.storage_offset() * view.itemsize == 512


def test_on_the_cpu_rows_are_copied_and_nothing_is_kept():
    pool = EmbeddingPool(torch.device("cpu"), CAPACITY)
    rows = torch.ones(2, 3)
    kept = pool.take(rows)
    rows.zero_()
    assert kept.sum() == 6 and pool.place_of(kept) is None
    pool.give_back(kept)
    assert (pool.places.used, pool.spilled_bytes) == (0, 0)
