"""A decode layer by kernels that fetch before they wait computes, and stores, what it does by the others."""

import pytest
import torch
from bench import decode_layer

# Two query heads a key head, k in one block and in three.
TINY = decode_layer.Shape(1, hidden=256, inner=384, heads=4, kv_heads=2, size=32, sequences=3, context=43)


@pytest.fixture
def layers() -> decode_layer.Layers:
    torch.manual_seed(0)
    return decode_layer.Layers(TINY, torch.float16, torch.device("cpu"))


def test_a_layer_is_as_the_others(layers: decode_layer.Layers) -> None:
    before = layers.stream + layers.x
    assert decode_layer.error_of_a_layer(layers) < 1e-3
    assert decode_layer.error(layers.stream, before) > 0.01  # a layer that adds nothing would be close, too


def test_its_parts_are_the_layer(layers: decode_layer.Layers) -> None:
    before = layers.stream.clone()
    layers.early(0)
    whole = layers.stream.clone()
    layers.stream.copy_(before)
    for part in decode_layer.PARTS:
        layers.early(0, part)
    assert torch.equal(layers.stream, whole)


def test_all_programs_meet_five_times_a_layer() -> None:
    """One program meets itself, and multiplies its eighth of the rows."""
    torch.manual_seed(0)
    bound = decode_layer.Bound(1, torch.float16, torch.device("cpu"))
    x = bound.rows[0].clone()
    bound.layers(1)
    assert bound.met.item() == 5
    expected = x[:10, :128].float() @ bound.weight[:32].float().T
    torch.testing.assert_close(bound.rows[1][:10, :32].float(), expected, rtol=2e-3, atol=2e-3)
