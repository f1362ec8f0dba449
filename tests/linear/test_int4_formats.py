"""GPTQ's versions told by values, columns sorted by group, and biases that a model does not have."""

import pytest
import torch
from measured_fakes import fill
from packers import gptq, quantized, words

from tessera.errors import CheckpointError
from tessera.linear.formats.compressed import Packed
from tessera.linear.formats.gptq import Gptq
from tessera.linear.formats.int4 import dequantize
from tessera.linear.scheme import Linear

WEIGHT = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def decode(scheme, tensors):
    return dequantize(**scheme.decode(tensors, 32, 64))


@pytest.mark.parametrize("label", [1, 2])
@pytest.mark.parametrize("stored", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
def test_symmetric_zeros_tell_their_version(label, stored, symmetric):
    """Whatever the label says of the version, and of the symmetry."""
    tensors, expected = gptq(32, True, stored_version=stored).pack(WEIGHT)
    assert torch.equal(decode(Gptq(32, label, symmetric), tensors), expected)


@pytest.mark.parametrize("version", [1, 2])
def test_fitted_zeros_are_read_by_the_label_and_refused_if_the_weights_contradict_it(version):
    tensors, expected = gptq(32, False, stored_version=version).pack(WEIGHT)
    assert torch.equal(decode(Gptq(32, version, False), tensors), expected)
    with pytest.raises(
        CheckpointError, match=rf"version {3 - version}.*mean is (1.0|0.9)\d steps.*0.0\d as version {version}"
    ):
        decode(Gptq(32, 3 - version, False), tensors)
    with pytest.raises(CheckpointError, match=r"sym = true\) are all 7"):
        decode(Gptq(32, version, True), tensors)


def test_a_zero_of_0_is_stored_as_15_by_version_1():
    """Groups of positive weights have it; beside them groups of negative ones, so that the mean stays."""
    weight = WEIGHT.abs() * torch.tensor([1, -1]).repeat_interleave(16)[:, None]
    tensors, expected = gptq(32, False).pack(weight)
    assert set(quantized(weight, 32, False)[1].flatten().tolist()) == {0, 15}
    assert torch.equal(decode(Gptq(32, 1, False), tensors), expected)


def test_scattered_columns_of_compressed_tensors():
    """weight_g_idx, which its package no longer writes: packed here."""
    order = torch.arange(64).flip(0) // 32
    codes, zeros, scales, expected = quantized(WEIGHT, 32, False, order)
    tensors = {
        "weight_packed": words(codes),
        "weight_scale": scales,
        "weight_zero_point": words(zeros.T).T,
        "weight_shape": torch.tensor([32, 64]),
        "weight_g_idx": order.int(),
    }
    assert torch.equal(decode(Packed(32, False, True), tensors), expected)


def test_groups_of_different_sizes_are_refused():
    tensors, _ = gptq(32, True).pack(WEIGHT)
    tensors["g_idx"][0] = 1
    with pytest.raises(CheckpointError, match="g_idx does not make 2 groups of one size"):
        decode(Gptq(32, 1, True), tensors)


def test_groups_that_do_not_divide_the_input_are_refused():
    with pytest.raises(CheckpointError, match="groups of 48 do not divide 64 input features"):
        decode(Gptq(48, 1, True), gptq(32, True).pack(WEIGHT)[0])


def layer(names, has_bias=False):
    rows = {name: slice(32 * number, 32 * number + 32) for number, name in enumerate(names)}
    return Linear(64, rows, has_bias, lambda _: Gptq(32, 1, True), torch.float32, torch.device("cpu"))


def test_a_bias_that_the_model_does_not_have_must_be_zero():
    tensors = gptq(32, True).pack(WEIGHT)[0]
    named = {f"q.{leaf}": tensor for leaf, tensor in tensors.items()}
    fill(layer("q"), named | {"q.bias": torch.zeros(32)})
    with pytest.raises(CheckpointError, match="^is not zero") as caught:
        fill(layer("q"), named | {"q.bias": torch.ones(32)})
    assert caught.value.name == "q.bias"


def test_parts_of_one_layer_must_have_one_order_of_columns():
    ordered, scattered = (gptq(32, True, desc_act=scatter).pack(WEIGHT)[0] for scatter in (False, True))
    named = {f"k.{leaf}": tensor for leaf, tensor in scattered.items()}
    fill(layer("kv"), named | {f"v.{leaf}": tensor for leaf, tensor in scattered.items()})
    with pytest.raises(CheckpointError, match="columns differ from those of k"):
        fill(layer("kv"), named | {f"v.{leaf}": tensor for leaf, tensor in ordered.items()})
