"""The vision tower on a GPU: graphs against plain torch there and on the CPU, with the default checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bench.parity import CHECKPOINT

from tessera.errors import ConfigError
from tessera.kernels.graphs import GraphPool
from tessera.models.registry import read_config
from tessera.settings.stages import VisionSettings
from tessera.vision.runner import load_runner
from tessera.vision.torch_runner import GraphRunner, TorchRunner, bucket_sizes

LARGEST = 16
ROUNDING = 1 << 20  # the allocator's, at most, for one tensor
LEAST_COSINE = {"float32": 0.99999, "bfloat16": 0.999}
SIDE, TOKENS = 448, 64


def on_gpu(runner: str, dtype: str) -> VisionSettings:
    return VisionSettings(runner, infer_batch_size=LARGEST, dtype=dtype, device="cuda")


def cosine(rows: torch.Tensor, expected: torch.Tensor) -> float:
    both = rows.double().cpu(), expected.double().cpu()
    return float(torch.nn.functional.cosine_similarity(*both, dim=-1).min())


@pytest.fixture(scope="module")
def tiles() -> np.ndarray:
    """Noise and smooth fields, none like another."""
    generator = torch.Generator().manual_seed(7)
    coarse = torch.rand(LARGEST, 3, 8, 8, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic").clamp(0, 1) * 255
    tiles = smooth.permute(0, 2, 3, 1).to(torch.uint8).contiguous()
    tiles[::3] = torch.randint(0, 256, tiles[::3].shape, generator=generator, dtype=torch.uint8)
    return tiles.numpy()


@pytest.fixture(scope="module")
def expected(tiles) -> torch.Tensor:
    return TorchRunner.from_checkpoint(read_config(CHECKPOINT), VisionSettings("torch", threads=4)).run(tiles)


@pytest.fixture(scope="module", params=LEAST_COSINE)
def dtype(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def runner(dtype) -> GraphRunner:
    return GraphRunner.from_checkpoint(read_config(CHECKPOINT), on_gpu("graph", dtype))


def test_every_graph_and_every_filled_up_size(runner, dtype, tiles, expected):
    assert runner._graphs.sizes == bucket_sizes(LARGEST)
    for count in range(1, LARGEST + 1):
        rows = runner.run(tiles[LARGEST - count :])  # others than those that the buffer held at the same place
        assert rows.is_cuda and rows.dtype == getattr(torch, dtype)
        assert cosine(rows, expected[(LARGEST - count) * TOKENS :]) >= LEAST_COSINE[dtype], count


def test_rows_stay_right_while_later_forwards_run(runner, tiles):
    alone = [runner.run(tiles[start : start + 4]).cpu() for start in range(0, LARGEST, 4)]
    # Nothing waits in between: each forward overwrites the buffers that the one before was copied out of.
    rows = [runner.run(tiles[start : start + 4]) for start in range(0, LARGEST, 4)]
    for _ in range(3):
        runner.run(tiles)
    for kept, expected in zip(rows, alone, strict=True):
        assert torch.equal(kept.cpu(), expected)


def test_small_graphs_and_large_ones_in_turn_give_the_rows_of_plain_torch(runner, dtype, tiles):
    """Whatever memory those of up to four tiles share with the others, which are recorded on another stream."""
    plain = TorchRunner.from_checkpoint(read_config(CHECKPOINT), on_gpu("torch", dtype))
    counts = (1, 16, 4, 5, 1, 4, 16, 5, 2)
    rows = [runner.run(tiles[LARGEST - count :]) for count in counts]  # nothing waits in between
    for count, own in zip(counts, rows, strict=True):
        assert cosine(own, plain.run(tiles[LARGEST - count :])) >= LEAST_COSINE[dtype], count


def test_rows_are_in_the_order_of_the_callers_stream(runner, tiles):
    """Tiles made by slow work on a stream of the caller's, rows used there at once, memory given back at once."""
    source, expected = torch.from_numpy(tiles[:4]).cuda(), runner.run(tiles[:4]).double().sum(1)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            torch.cuda._sleep(20_000_000)
            late = source.clone()
            sums = runner.run(late).double().sum(1)
            late.zero_()
            del late
        stream.synchronize()
    assert torch.equal(sums, expected)


def test_a_forward_allocates_what_it_said(runner, tiles):
    device_tiles = torch.from_numpy(tiles).cuda()
    for count in (1, 7, LARGEST):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rows = runner.run(device_tiles[:count])
        torch.cuda.synchronize()
        assert rows.nbytes <= torch.cuda.max_memory_allocated() - before <= runner.activation_bytes(count) + ROUNDING
        del rows


def test_the_graphs_memory_is_bounded(dtype):
    """With weights and buffers they keep little more than what the largest needs as plain torch."""
    plain, weights = load_runner(read_config(CHECKPOINT), on_gpu("torch", dtype))
    _, kept = load_runner(read_config(CHECKPOINT), on_gpu("graph", dtype))
    assert weights < kept <= weights + 2 * plain.activation_bytes(LARGEST) + (128 << 20)


def test_what_does_not_fit_is_refused(monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(GraphPool, "record", full)
    with pytest.raises(ConfigError, match=r"lower\s+visual_infer_batch_size"):
        GraphRunner.from_checkpoint(read_config(CHECKPOINT), on_gpu("graph", "bfloat16"))
