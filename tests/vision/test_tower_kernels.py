"""The kernels of InternVL's tower against torch spelt out, quantized rows too, and the class token's share of the
attention; in triton's interpreter where there is no GPU."""

import pytest
import torch
from tiny_checkpoints import Shape, hf_native
from torch import nn
from torch.nn import functional

from tessera.kernels.fp8_rows import E4M3, Fp8Rows, quantize_rows
from tessera.kernels.reference import add_and_norm
from tessera.kernels.tower_attention import attend, attend_class_apart
from tessera.kernels.tower_layers import PLAIN, gpu_kernels
from tessera.kernels.tuning import MeasuredChoices
from tessera.models.registry import read_config
from tessera.models.tower import load_tower

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels import activation, merge_class
from tessera.kernels.norm import add_layer_norm

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# The interpreter computes bfloat16 wrongly without saying so.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * HAS_GPU
EPS = 1e-6


@pytest.fixture(autouse=True)
def stored(monkeypatch):
    """The interpreter's cast to e4m3 loses carries: there the kernels store float32, and :func:`e4m3` casts."""
    if not HAS_GPU:
        monkeypatch.setattr("tessera.kernels.fp8_rows.ROWS_DTYPE", torch.float32)


def e4m3(rows: Fp8Rows) -> Fp8Rows:
    return Fp8Rows(rows.values.to(E4M3), rows.scales)


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def quantized(x: torch.Tensor) -> Fp8Rows:
    """The twin's, on the CPU, of rows [..., size]."""
    values, scales = quantize_rows(x.cpu().flatten(0, -2))
    return Fp8Rows(values.view(x.shape), scales.view(*x.shape[:-1], 1))


def assert_equal_rows(actual: Fp8Rows, expected: Fp8Rows) -> None:
    """Bit for bit."""
    assert torch.equal(actual.scales.cpu(), expected.scales)
    assert torch.equal(actual.values.cpu().float(), expected.values.float())


def assert_close_rows(actual: Fp8Rows, x: torch.Tensor) -> None:
    """The rows of an x that is known but for its last bits: half a step of e4m3 away, and no more than that."""
    worst = float(x.abs().max()) / 448 * 2**-10
    torch.testing.assert_close(actual.dequantized(), x.float(), rtol=2**-4 + 2**-8, atol=worst + 2e-3)
    torch.testing.assert_close(actual.scales * 448, x.float().abs().amax(-1, keepdim=True), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (2, 3, 1024), (5, 100), (1, 8192)])
@pytest.mark.parametrize("has_update", [True, False])
def test_add_layer_norm(dtype, shape, has_update):
    """Quantized, bit for bit as in front of quantize_rows; but for float32's last bits where it is compiled."""
    x, update = normal(2, *shape, dtype=dtype) * 3 + 1
    weight, bias = normal(2, shape[-1], dtype=dtype, seed=1)
    update = update if has_update else None
    norm = nn.LayerNorm(shape[-1], EPS, dtype=dtype, device=DEVICE).requires_grad_(False)
    norm.weight.copy_(weight), norm.bias.copy_(bias)
    expected, expected_sum = add_and_norm(x, update, norm)
    given = x.clone()
    actual, total = add_layer_norm(given, update, weight, bias, EPS)
    assert total is given and torch.equal(total, expected_sum)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=2 * step, atol=max(2 * step, 4e-6))
    rows, total = add_layer_norm(x, update, weight, bias, EPS, fp8=True)
    assert total is x and torch.equal(total, expected_sum)
    if HAS_GPU and dtype == torch.float32:
        assert_close_rows(rows, actual)
    else:
        assert_equal_rows(e4m3(rows), quantized(actual))


def test_add_layer_norm_rounds_the_sum_first():
    # 2048 + 1 is no float16 number: the unrounded sum would have a mean and a variance of its own.
    x = torch.full((1, 16), 2048.0, dtype=torch.float16, device=DEVICE)
    update = torch.ones_like(x)
    update[0, ::2] = 0
    ones = torch.ones(16, dtype=torch.float16, device=DEVICE)
    normed, total = add_layer_norm(x, update, ones, ones, EPS)
    assert torch.equal(total, torch.full_like(total, 2048)) and torch.equal(normed, torch.ones_like(normed))


def test_add_layer_norm_of_values_far_from_zero():
    """Two passes over the row: the difference of two squares would leave nothing of so small a variance."""
    x = 1000 + normal(3, 64) / 100
    expected = torch.nn.functional.layer_norm(x.double(), (64,), eps=EPS).float()
    actual, _ = add_layer_norm(x, None, torch.ones(64, device=DEVICE), torch.zeros(64, device=DEVICE), EPS)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.03)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 4096), (2, 100)])
def test_gelu_rows(dtype, shape):
    x = normal(*shape, dtype=dtype) * 4
    x[0] = 0
    rows = e4m3(activation.gelu_rows(x))
    assert rows.values.shape == shape and rows.scales.shape == (*shape[:-1], 1)
    assert_close_rows(rows, functional.gelu(x.float(), approximate="tanh"))
    assert not rows.values[0].float().any()
    far = torch.tensor([[-1e4, -20.0, 30.0, 1e4]], device=DEVICE)
    assert e4m3(activation.gelu_rows(far)).dequantized().tolist()[0] == pytest.approx([0, 0, 30, 1e4], abs=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 8), (1, 5120)])
def test_quick_gelu(dtype, shape):
    """In place, and bit for bit the same in front of quantize_rows."""
    x = normal(*shape, dtype=dtype) * 3
    expected = (x.double() * torch.sigmoid(1.702 * x.double())).to(dtype)
    rows = e4m3(activation.gelu_rows(x, quick=True))
    given = x.clone()
    actual = activation.quick_gelu_in_place(given)
    assert actual is given
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=2 * step, atol=1e-6)
    assert_equal_rows(rows, quantized(actual))
    far = torch.tensor([[-1e4, -1e3, 30.0, 1e4] * 2], device=DEVICE)
    assert activation.quick_gelu_in_place(far).tolist()[0] == [0, 0, 30, 1e4] * 2


def parts_of_attention(dtype, shape, seed=0):
    """q, k, v as the parts of one matrix product, and the attention of the parts that are merged, in float64."""
    tiles, tokens, heads, size = shape
    query, key, value = (normal(tiles, tokens, 3, heads, size, seed=seed) * 2).to(dtype).unbind(2)
    wide = [rows.double().transpose(1, 2) for rows in (query, key, value)]
    scores = wide[0] @ wide[1].transpose(-1, -2) * size**-0.5
    first = (scores[:, :, :1].softmax(-1) @ wide[2]).transpose(1, 2).to(dtype).contiguous()
    rest = scores[:, :, 1:, 1:]
    others = (rest.softmax(-1) @ wide[2][:, :, 1:]).transpose(1, 2).to(dtype).contiguous()
    return first, others, rest.logsumexp(-1).float(), query, key, value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 17, 4, 8), (1, 5, 3, 80), (1, 2, 16, 64), (3, 1, 2, 16)])
def test_the_class_token_is_merged_into_the_others_attention(dtype, shape):
    """Quantized, bit for bit as the same kernel in front of quantize_rows."""
    parts = parts_of_attention(dtype, shape)
    expected = attend(*parts[3:])
    step = torch.finfo(dtype).eps
    tolerance = dict(rtol=8 * step, atol=32 * step)
    actual = merge_class.merge_class(*parts)
    torch.testing.assert_close(actual, expected, **tolerance)
    assert_equal_rows(e4m3(merge_class.merge_class(*parts, fp8=True)), quantized(actual))


def test_a_class_token_that_is_all_or_nothing_to_the_others():
    """Scores apart by far more than exp can hold."""
    first, others, sums, query, key, value = parts_of_attention(torch.float32, (1, 5, 2, 8))
    out = merge_class.merge_class(first, others, sums + 1e4, query, key, value).unflatten(-1, (2, 8))
    torch.testing.assert_close(out[:, 1:], others)
    out = merge_class.merge_class(first, others, sums - 1e4, query, key, value).unflatten(-1, (2, 8))
    torch.testing.assert_close(out[:, 1:], value[:, :1].expand_as(others))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: add_layer_norm(torch.ones(2, 8193), None, *torch.ones(2, 8193), EPS), "at most 8192"),
        (lambda: add_layer_norm(torch.ones(16, 2).T, None, *torch.ones(2, 16), EPS), "contiguous"),
        (lambda: add_layer_norm(torch.ones(2, 16), torch.ones(16, 2).T, *torch.ones(2, 16), EPS), "contiguous"),
        (lambda: activation.gelu_rows(torch.ones(1, 32769)), "at most 32768"),
        (lambda: activation.gelu_rows(torch.ones(16, 2).T), "contiguous"),
        (lambda: activation.quick_gelu_in_place(torch.ones(16, 8).T), "contiguous"),
        (lambda: activation.quick_gelu_in_place(torch.ones(8, 20)), "multiple of 8"),
        (lambda: merge_class.merge_class(*[torch.ones(1, 2, 129, 64)] * 6), "at most 8192"),
        (lambda: merge_class.merge_class(*[torch.ones(1, 2, 8, 4).transpose(2, 3)] * 6), "beside each other"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_without_measurements_each_tile_attends_by_itself(tmp_path):
    """By one kernel for any number of them."""
    tower = load_tower(read_config(hf_native(tmp_path / "tiny", Shape(image_size=56, patch_size=14)))).half().to(DEVICE)
    kernels = tower.tuned(3, None).keywords["kernels"]
    assert not kernels.epilogue
    query, key, value = normal(3, 17, 3, 2, 16).half().unbind(2)
    torch.testing.assert_close(kernels.attend(query, key, value), PLAIN.attend(query, key, value), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "silu"])
def test_the_activation_in_place(activation):
    linear, x = nn.Linear(8, 16).requires_grad_(False).to(DEVICE), normal(3, 5, 8)
    expected = PLAIN.linear_and_activate(x, linear, activation)
    torch.testing.assert_close(gpu_kernels().linear_and_activate(x, linear, activation), expected)


def test_each_part_is_chosen_by_measurement(tmp_path, monkeypatch):
    folder = hf_native(tmp_path / "tiny", Shape(image_size=56, patch_size=14))
    tower = load_tower(read_config(folder), torch.bfloat16).to(DEVICE)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some card")
    questions = []

    class Scripted(MeasuredChoices):
        def fastest(self, question, ways):
            questions.append(question)
            assert all(callable(way) for way in ways.values())
            return list(ways)[-1]

    kernels = tower.tuned(3, Scripted(tmp_path / "choices.json", lambda way: 1.0)).keywords["kernels"]
    assert kernels.attend is attend_class_apart
    assert kernels.epilogue
    attention, gelu = questions
    for named in ("3 x 17", "heads of", "torch.bfloat16", "some card"):
        assert named in attention
    for named in ("gelu", "51 rows", "torch.bfloat16", "some card"):
        assert named in gelu
    wide = load_tower(read_config(folder)).to(DEVICE)
    exact = wide.tuned(3, Scripted(tmp_path / "choices.json", lambda way: 1.0)).keywords["kernels"]
    assert not exact.epilogue and len(questions) == 2
