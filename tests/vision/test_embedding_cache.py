"""The cache of rows: what is found is what was put, whatever was put out between; memory is what was asked for."""

from __future__ import annotations

import random
from collections import OrderedDict

import torch

from tessera.vision.memory import EmbeddingCache

HIDDEN = 4
ROW = HIDDEN * torch.bfloat16.itemsize


def cache_of(rows: int) -> EmbeddingCache:
    return EmbeddingCache(rows * ROW + ROW - 1, HIDDEN, torch.bfloat16)  # what is left over holds no row


def rows_of(number: int, count: int) -> torch.Tensor:
    return (number + torch.arange(count) / 8).to(torch.bfloat16)[:, None].expand(-1, HIDDEN)


def test_it_holds_what_a_plain_list_by_last_use_would_hold():
    """1,000 pictures of all sizes: a model in Python says which are kept."""
    dice, cache, room = random.Random(1), cache_of(40), 40
    expected: OrderedDict[int, torch.Tensor] = OrderedDict()
    for _ in range(1000):
        key = dice.randrange(24)
        rows = rows_of(key, 1 + key % 13)
        found = cache.get(key)
        assert (found is not None) == (key in expected)
        if found is None:
            cache.put(key, rows)
            while sum(map(len, expected.values())) + len(rows) > room:
                expected.popitem(last=False)
            expected[key] = rows
        else:
            expected.move_to_end(key)
            assert torch.equal(found, rows)
        assert cache.used_bytes == ROW * sum(map(len, expected.values()))


def test_rows_that_were_found_outlive_their_place():
    cache = cache_of(8)
    cache.put("old", rows_of(1, 8))
    found = cache.get("old")
    cache.put("new", rows_of(2, 8))
    assert torch.equal(found, rows_of(1, 8))
    assert cache.get("old") is None and torch.equal(cache.get("new"), rows_of(2, 8))


def test_a_picture_larger_than_the_cache_puts_nothing_out():
    cache = cache_of(8)
    cache.put("small", rows_of(1, 3))
    cache.put("large", rows_of(2, 9))
    assert cache.get("large") is None and cache.get("small") is not None


def test_what_is_kept_already_is_not_kept_twice():
    cache = cache_of(8)
    cache.put("one", rows_of(1, 5))
    cache.put("one", rows_of(2, 5))
    assert cache.used_bytes == 5 * ROW and torch.equal(cache.get("one"), rows_of(1, 5))
