"""Attention within pictures of any sizes, and the turning in front of it, against their twins in torch."""

import pytest
import torch

from tessera.kernels.operands import AttentionPlan, filled_head, parts_of
from tessera.kernels.tower_attention import attend_in_triton, attend_within
from tessera.kernels.tower_layers import PLAIN, gpu_kernels, varlen_backends

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels.rotary import apply_rotary

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# The interpreter computes bfloat16 wrongly without saying so.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * HAS_GPU
PLAN = AttentionPlan(rows=32, tokens=16, warps=4, stages=2)
MIXES = [[4], [16], [32, 32], [4, 40, 1, 33, 64, 4]]


def heads_of(patches, heads, size, dtype=torch.float32, seed=0):
    """qkv [patches, 3, heads, size], as the product in front gives it."""
    qkv = torch.randn(patches, 3, heads, size, generator=torch.Generator().manual_seed(seed)) * 2
    return qkv.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 64, 80])
@pytest.mark.parametrize("lengths", MIXES, ids=str)
def test_pictures_of_any_sizes_in_one_launch(dtype, size, lengths):
    qkv = heads_of(sum(lengths), 2, size, dtype)
    expected = attend_within(lengths, DEVICE)(*qkv.double().unbind(1)).to(dtype)
    actual = attend_in_triton(lengths, DEVICE, PLAN)(*qkv.unbind(1))
    assert actual.is_contiguous() and actual.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=4 * step, atol=max(4 * step, 1e-5))


def test_large_scores_are_no_reason_to_overflow():
    query, key, value = heads_of(40, 2, 16).unbind(1)
    expected = attend_within([40], DEVICE)(100 * query, 100 * key, value)
    actual = attend_in_triton([40], DEVICE, PLAN)((100 * query).contiguous(), (100 * key).contiguous(), value)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("length", [20, 33])
def test_a_neighbours_not_a_numbers_stay_there(length):
    lengths = [length, 20, length]
    qkv = heads_of(sum(lengths), 2, 80)
    qkv[length : length + 20] = float("nan")
    own = torch.cat((qkv[:length], qkv[length + 20 :]))
    expected = attend_within([length, length], DEVICE)(*own.unbind(1))
    actual = attend_in_triton(lengths, DEVICE, PLAN)(*qkv.unbind(1))
    torch.testing.assert_close(torch.cat((actual[:length], actual[length + 20 :])), expected, rtol=1e-5, atol=1e-5)
    assert actual[length : length + 20].isnan().all()


@pytest.mark.parametrize(("size", "filled"), [(8, 16), (20, 32), (72, 80), (112, 128)])
def test_other_head_sizes_are_refused_and_may_be_filled_up(size, filled):
    with pytest.raises(ValueError, match=f"heads of {size} values"):
        parts_of(size)
    assert filled_head(size) == filled_head(filled) == filled


def test_scattered_heads_are_refused():
    scattered = torch.zeros(4, 16, 2, device=DEVICE).transpose(1, 2)
    with pytest.raises(ValueError, match="beside each other"):
        attend_in_triton([4], DEVICE, PLAN)(scattered, scattered, scattered)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "size"), [(2, 16), (3, 80), (16, 64)])
def test_heads_are_turned_in_place(dtype, heads, size):
    qkv = heads_of(5, heads, size, dtype)
    angles = torch.rand(5, size // 2, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 50
    turns = torch.stack((angles.cos(), angles.sin()))
    expected = torch.stack(PLAIN.layers.apply_rotary(qkv, turns), dim=1)
    assert torch.equal(expected[:, 2], qkv[:, 2]) and not torch.equal(expected, qkv)
    given = qkv.clone()
    rows = gpu_kernels().layers.apply_rotary(given, turns)
    # A fused multiplication and addition may round once where the twin rounds twice.
    step = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(torch.stack(rows, dim=1), expected, rtol=step, atol=2 * step)
    assert rows[0].data_ptr() == given.data_ptr()


@pytest.mark.parametrize("turns", [torch.zeros(2, 4, 8), torch.zeros(2, 8, 5).mT], ids=["others", "strided"])
def test_turns_of_other_patches_are_refused(turns):
    with pytest.raises(ValueError, match="apply_rotary: contiguous"):
        apply_rotary(heads_of(5, 2, 16), turns.to(DEVICE))


def test_ways_for_pictures_of_one_size_are_more():
    equal, mixed = varlen_backends(DEVICE, True), varlen_backends(DEVICE, False)
    assert set(equal) - set(mixed) == {"cudnn", "flash"} and mixed["default"] is PLAIN.attend_within
