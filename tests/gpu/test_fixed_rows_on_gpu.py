"""On a GPU each row's bits are its own where a server is deterministic: of every kernel, for every number of rows that
a step may have and any cut of a prompt."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kernels.paged_fakes import PagedBatch

from tessera.attention.backend import HeadShape
from tessera.engine.execution.sampler import SamplingRow, sample
from tessera.engine.sequence import SamplingParameters
from tessera.kernels.fixed_rows import FixedRows
from tessera.kernels.fp8_rows import Fp8Rows, quantize_rows
from tessera.kernels.operands import finished
from tessera.kernels.row_linear import row_linear
from tessera.kernels.tower_attention import attend_in_triton, fixed_plan
from tessera.kernels.transfer import Moment
from tessera.kernels.tuning import layer_kernels
from tessera.linear.formats.fp8 import Fp8
from tessera.linear.formats.int4 import Int4
from tessera.linear.scheme import Linear, LinearShape
from tessera.linear.tuning import choose
from tessera.linear.unquantized import RmsNorm, Unquantized

MOST = 8192
COUNTS = [*range(1, 513), *sorted(random.Random(7).sample(range(513, MOST), 63)), MOST]
#: outputs and inputs of InternVL3-8B's layers, gate_up's narrower; and of its tower's, the patches' of an odd width
SHAPES = {"qkv": (4608, 3584), "output": (3584, 3584), "gate_up": (9728, 3584), "down": (3584, 18944)}
NARROW = {"paddle output": (1024, 2048), "paddle down": (1024, 3072), "mineru output": (896, 896)}
TOWER = {"fc1": (4096, 1024), "fc2": (1024, 4096), "patches": (1024, 588)}


class Drawn(Int4):
    """Filled at random alone."""

    def decode(self, tensors, out_features, in_features):
        raise NotImplementedError


SCHEMES = {"bfloat16": Unquantized, "float16": Unquantized, "fp8": Fp8, "int4": partial(Drawn, 128)}
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def fixed():
    with torch.inference_mode(), FixedRows():
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator(CUDA).manual_seed(4)


def normal(generator, *shape):
    return torch.randn(shape, device=CUDA, generator=generator).bfloat16()


def wide(generator, *shape):
    """Of magnitudes from a thousandth to a thousand, as activations have them: sums are cut off in other places."""
    return (normal(generator, *shape) * torch.randn(shape, device=CUDA, generator=generator).mul_(3).exp2_()).bfloat16()


def counts_that_differ(run, x, counts=COUNTS):
    """Those of which some rows of ``run`` have other bits than among all of x."""
    whole, wrong = run(x), []
    for count in counts:
        first = 37 * count % (len(x) - count + 1)
        found = run(x[first : first + count].clone())
        if not torch.equal(found, whole[first : first + count]):
            wrong.append(count)
    return wrong


@pytest.mark.parametrize("form", SCHEMES)
@pytest.mark.parametrize(("place", "shape"), SHAPES.items())
def test_linear_layers(generator, form, place, shape):
    outputs, inputs = shape
    biased, dtype = place == "qkv", torch.float16 if form == "float16" else torch.bfloat16
    layer = Linear(inputs, {"w": slice(0, outputs)}, biased, lambda names: SCHEMES[form](), dtype, CUDA)
    layer.randomize(generator)
    choose([layer], LinearShape(outputs, inputs, biased, place, dtype, MOST), None, "")

    def run(x):
        given = quantize_rows(x) if layer.wants_fp8_input(len(x)) else x
        return layer.gated(given) if place == "gate_up" else finished(layer.deferred(given))

    x = normal(generator, MOST, inputs).half() if form == "float16" else wide(generator, MOST, inputs)
    assert counts_that_differ(run, x) == []


@pytest.mark.parametrize(("outputs", "inputs"), TOWER.values(), ids=TOWER)
def test_a_towers_layers(generator, outputs, inputs):
    """Of which some are the library's."""
    weight, bias = normal(generator, outputs, inputs), normal(generator, outputs)
    counts = [1, 2, 63, 64, 65, 256, 1025, 2050, 7175]
    run = lambda x: torch.nn.functional.linear(x, weight, bias)  # noqa: E731
    with FixedRows().learning():
        assert counts_that_differ(run, wide(generator, MOST, inputs), counts) == []


@pytest.mark.parametrize(("outputs", "inputs"), NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 256])
def test_a_narrow_layers_few_rows(generator, outputs, inputs, count):
    """Of which each has so few values that it takes many to see another order of their sums."""
    weight = normal(generator, outputs, inputs)
    x = wide(generator, 4096, inputs)
    with FixedRows().learning():
        found = torch.cat([F.linear(rows, weight) for rows in x[: 256 * count].split(count)])
        assert torch.equal(found, row_linear(x, weight)[: len(found)])


@pytest.mark.parametrize("size", [128, 3584])
@pytest.mark.parametrize("fp8", [False, True])
def test_norms(generator, size, fp8):
    norm = RmsNorm(size, 1e-6, torch.bfloat16, CUDA)
    norm.get_buffer("weight").fill_(0.7)

    def run(x):
        normed, total = norm(x, x.roll(1, 1).contiguous(), fp8)
        return torch.cat((normed.dequantized() if isinstance(normed, Fp8Rows) else normed.float(), total.float()), 1)

    assert counts_that_differ(run, wide(generator, MOST, size)) == []


@pytest.mark.parametrize("form", ["bfloat16", "fp8"])
def test_experts(generator, form):
    """Of Qwen3-30B-A3B's shape, a quarter of them; the sum of a token's experts is the norm's."""
    hidden, size, experts, picked = 2048, 768, 32, 8
    kernels = layer_kernels("cuda")
    gates, downs = normal(generator, experts * 2 * size, hidden) / 45, normal(generator, experts * hidden, size) / 27
    router, norm = normal(generator, experts, hidden), RmsNorm(hidden, 1e-6, torch.bfloat16, CUDA)
    norm.get_buffer("weight").fill_(1)
    if form == "fp8":
        gates, downs = quantize_rows(gates), quantize_rows(downs)
    given = quantize_rows if form == "fp8" else lambda x: x

    def run(x):
        routing = kernels.route(torch.nn.functional.linear(x, router), picked, True)
        gated = kernels.grouped_gate_up(given(x), gates, routing)
        return norm(kernels.grouped_down(given(gated), downs, routing), torch.zeros_like(x))[1]

    assert counts_that_differ(run, wide(generator, MOST, hidden), COUNTS[::7]) == []


CONTEXTS = [1, 17, 64, 65, 255, 256, 257, 300, 700, 1852, 4096, 4097, 5000, 9001]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(28, 4, 128), (16, 8, 64), (12, 2, 96)])
def test_attention_at_any_cut(generator, fp8, heads, kv_heads, size):
    """The last queries of each sequence: all of them, some, and one as a decode step has it."""
    from tessera.kernels.row_attention import PLAN, row_decode, row_prefill
    from tessera.kernels.varlen_prefill import prefill_tiles

    shape = HeadShape(heads, kv_heads, size)
    batch = PagedBatch(shape, CONTEXTS, CONTEXTS, torch.bfloat16, "cuda", generator, fp8)
    ends, contexts = np.cumsum(CONTEXTS), np.array(CONTEXTS)

    def last(most):
        counts = np.minimum(most, contexts)
        rows = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts)])
        tiles = prefill_tiles(counts, contexts, PLAN.rows // (heads // kv_heads))
        row, count, at, cut = (torch.from_numpy(x).cuda() for x in (counts.cumsum() - counts, counts, rows, tiles))
        q = batch.q[at]
        given = batch.cache, row, count, batch.context, batch.blocks, cut, batch.scale
        return at, row_prefill(q, *given, torch.empty_like(q))

    whole = last(MOST * 2)[1]
    for most in (1, 2, 5, 100, 4000):
        at, found = last(most)
        assert torch.equal(found, whole[at])
    # As many single queries as show sums of another order, whose roundings differ once in a hundred thousand values.
    sequence = torch.repeat_interleave(torch.arange(len(contexts)), torch.tensor(CONTEXTS)).cuda()
    place = torch.cat([torch.arange(1, context + 1) for context in CONTEXTS]).cuda()
    many, ends = torch.randperm(len(place), device="cuda")[:6000], torch.from_numpy(ends - 1).cuda()
    for rows, splits in ((many, 1), *((ends, splits) for splits in (1, 2, 4, 8, 16))):
        q, blocks = batch.q[rows], batch.blocks[:, sequence[rows]]
        found = row_decode(q, batch.cache, blocks, place[rows], batch.scale, splits, torch.empty_like(q))
        assert torch.equal(found, whole[rows])


@pytest.mark.parametrize("size", [64, 80])
def test_a_picture_attends_as_alone(generator, size):
    plan, lengths = fixed_plan(CUDA), [1025, 64, 100, 4096, 7, 129, 1025]
    parts = normal(generator, sum(lengths), 3, 16, size).split(lengths)
    whole = attend_in_triton(lengths, CUDA, plan)(*torch.cat(parts).unbind(1)).split(lengths)
    for part, length, found in zip(parts, lengths, whole):
        assert torch.equal(attend_in_triton([length], CUDA, plan)(*part.clone().unbind(1)), found)


def test_log_probabilities_and_draws(generator):
    """Of a vocabulary of which rows do not begin at multiples of 16 bytes, in bfloat16, where many tokens are equal."""
    logits = normal(generator, 70, 151_674) * 3
    asked = SamplingParameters.parse(dict(temperature=0.9, top_p=0.95, logprobs=5))
    rows = [SamplingRow(asked, seed=number, place=number) for number in range(len(logits))]
    whole = sample(logits.clone(), rows, Moment(CUDA)).tokens()
    for first, count in ((0, 1), (1, 1), (2, 3), (13, 1), (5, 64)):
        part = slice(first, first + count)
        assert sample(logits[part].clone(), rows[part], Moment(CUDA)).tokens() == whole[part]
