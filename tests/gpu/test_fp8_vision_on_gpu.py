"""The vision tower in FP8 on a GPU: graphs against the fake-quantized tower of the CPU, with the default checkpoint."""

from __future__ import annotations

import pytest
import torch
from bench.parity import CHECKPOINT

from tessera.kernels.fp8_rows import Fp8Rows
from tessera.kernels.tower_attention import attend, attend_class_apart
from tessera.kernels.tower_layers import ATTENTIONS, gpu_kernels
from tessera.models.registry import read_config
from tessera.models.tower import unfilled_tower
from tessera.settings.stages import VisionSettings
from tessera.vision.fp8_tower import gate_tiles, serving_tower
from tessera.vision.runner import load_runner
from tessera.vision.torch_runner import GraphRunner

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with FP8"
)

ON_GPU = VisionSettings("graph", infer_batch_size=4, dtype="bfloat16", device="cuda", quantization="fp8")


def cosine(rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(rows.double().cpu(), expected.double().cpu(), dim=-1)


@pytest.fixture(scope="module")
def tiles() -> torch.Tensor:
    return gate_tiles((448, 448, 3))


@pytest.fixture(scope="module")
def runner() -> GraphRunner:
    runner, _ = load_runner(read_config(CHECKPOINT), ON_GPU)
    assert isinstance(runner, GraphRunner)
    return runner


@pytest.mark.parametrize("quantization", ["fp8", "checkpoint"])
def test_graphs_give_the_rows_of_the_cpu(runner, tiles, quantization):
    """Closer to the fake-quantized tower than to the unquantized one, which is what the gate compares with."""
    settings = VisionSettings("torch", threads=4, quantization=quantization)
    expected = load_runner(read_config(CHECKPOINT), settings)[0].run(tiles)
    least = 0.99 if quantization == "checkpoint" else 0.995
    for count in (1, 3, 4):
        rows = runner.run(tiles[:count])
        assert rows.dtype == torch.bfloat16
        assert cosine(rows, expected[: len(rows)]).mean() > least


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_in_front_of_the_output_in_fp8(tiles, attention):
    tower = serving_tower(read_config(CHECKPOINT), ON_GPU)
    given = tiles.cuda()
    with torch.inference_mode():
        found = cosine(tower(given, kernels=gpu_kernels(attention, fp8=True)), tower(given))
    assert found.mean() > 0.995  # the steps of e4m3 that the last bits decide


@pytest.mark.parametrize("shape", [(2, 1025, 16, 64), (3, 257, 4, 64), (1, 130, 2, 128)], ids=str)
def test_the_class_token_apart(shape):
    """Of queries, keys and values that are views of one product."""
    tiles, tokens, heads, size = shape
    torch.manual_seed(5)
    product = torch.randn(tiles, tokens, 3, heads, size, device="cuda", dtype=torch.bfloat16)
    product[:, 0] *= 3  # a class token that some tokens look at
    query, key, value = product.unbind(2)
    exact = attend(query.float(), key.float(), value.float())
    for rows in (attend_class_apart(query, key, value), attend(query, key, value)):
        torch.testing.assert_close(rows.float(), exact, rtol=2**-7, atol=2**-7)
    quantized = attend_class_apart(query, key, value, fp8=True)
    assert isinstance(quantized, Fp8Rows)
    torch.testing.assert_close(quantized.dequantized(), exact, rtol=2**-4 + 2**-7, atol=2**-6)


def test_what_is_kept_is_less_than_in_bfloat16(runner):
    plain = unfilled_tower(read_config(CHECKPOINT)).to(torch.bfloat16).weight_bytes
    assert runner.tower.weight_bytes < 0.75 * plain
