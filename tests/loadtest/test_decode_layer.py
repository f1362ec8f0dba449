"""The prototype of a decode layer computes, and stores, what today's kernels do."""

import pytest
import torch
from bench import decode_layer

# Two query heads a key head, k in one block and in three, two programs a context, the second of which has 11 tokens.
TINY = decode_layer.Shape(1, hidden=256, inner=384, heads=4, kv_heads=2, size=32, sequences=3, context=43, tokens=32)


@pytest.fixture
def layers() -> decode_layer.Layers:
    torch.manual_seed(0)
    return decode_layer.Layers(TINY, torch.float16, torch.device("cpu"))


def test_a_layer_is_as_todays(layers: decode_layer.Layers) -> None:
    before = layers.stream + layers.x
    assert decode_layer.error_of_a_layer(layers) < 1e-3
    assert decode_layer.error(layers.stream, before) > 0.01  # a layer that adds nothing would be close, too


def test_the_newest_keys_and_values_are_stored(layers: decode_layer.Layers) -> None:
    before = layers.stream + layers.x
    layers.today(0)
    caches = layers.caches[0][:2]
    expected = [cache.clone() for cache in caches]
    for cache in caches:
        cache.flatten(0, 1)[layers.slots] = float("nan")
    layers.stream.copy_(before)
    layers.fused(0)
    for cache, stored in zip(caches, expected):
        torch.testing.assert_close(cache, stored, rtol=2e-3, atol=2e-3)
