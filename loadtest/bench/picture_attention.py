"""Ways of attention within pictures on one GPU, in bfloat16 (`attention --pictures`).

16 heads of 80 values, Qwen2-VL's: the seed's shape beside the seed's own table, the batches of W5a and W5b, and
pictures of many sizes. Milliseconds in a CUDA graph, TFLOP/s over the heads' 80 values, the error in norm against
float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import figures
import numpy as np
import torch
from torch.nn.attention import SDPBackend

from tessera.kernels.attention_plan import AttentionPlan
from tessera.kernels.tower_attention import Attend, Within, attend_in_triton, attend_within
from tessera.kernels.tower_layers import within_ways
from tessera.kernels.tuning import graph_milliseconds
from tessera.kernels.varlen_attention import PLANS

HEADS, SIZE = 16, 80
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
SEED = [7956]
#: milliseconds at that shape on an RTX 4090D, as LightLLM published them
SEEDS_TABLE = {"sgl_kernel": 2.711, "xFormers": 2.791, "SDPA": 2.906}
BATCHES = {
    "the seed's shape": SEED,
    "16 x 1024": [1024] * 16,
    "5 x 5476 (W5a)": [5476] * 5,
    "32 x 1024 (W5b)": [1024] * 32,
    "60 crops and a page": [5476, *(4 * np.random.default_rng(0).integers(8, 150, 60)).tolist()],
}
SWEEP = [
    AttentionPlan(*numbers)
    for numbers in (
        *((128, 64, 8, 3), (128, 64, 8, 4), (64, 128, 4, 2), (64, 64, 4, 4), (128, 64, 4, 2), (128, 64, 4, 4)),
        *((128, 128, 8, 2, 128), (128, 128, 8, 3), (64, 128, 4, 3), (128, 32, 4, 4), (256, 64, 8, 3), (64, 64, 4, 2)),
    )
]


def table(late: Callable[[], bool]) -> None:
    """Prints it, and the figure of the seed's shape; no plan beyond those that serve is tried once it is ``late``."""
    ways = within_ways(DEVICE, True) | {f"triton {plan}": partial(attend_in_triton, plan=plan) for plan in SWEEP}
    inputs = {name: _random(lengths) for name, lengths in BATCHES.items()}
    exact = {name: _exact(lengths, inputs[name]) for name, lengths in BATCHES.items()}
    print(f"\nattention within pictures, {HEADS} heads of {SIZE}: ms, TFLOP/s, error")
    print("the seed's table, 4090D: " + ", ".join(f"{name} {ms} ms" for name, ms in SEEDS_TABLE.items()))
    print(" " * 22 + "".join(f"{name:>22}" for name in BATCHES), flush=True)
    at_seed: dict[str, float] = {}
    for number, (name, way) in enumerate(ways.items()):
        if number >= len(ways) - len(SWEEP) and late():
            print("no time for the rest")
            break
        cells = []
        for batch, lengths in BATCHES.items():
            try:
                attend = way(lengths, DEVICE)
                ms = graph_milliseconds(partial(attend, *inputs[batch]))
                error = _error(attend, inputs[batch], lengths, exact[batch])
            except Exception as refusal:  # a way that cannot do it: any library's own error
                cells.append(str(refusal).replace("\n", " ")[:20])
                continue
            if lengths is SEED:
                at_seed[name] = ms
            flop = 4 * sum(length**2 for length in lengths) * HEADS * SIZE
            cells.append(f"{ms:.3f} {flop / ms / 1e9:.0f} {error:.4f}" + " WRONG" * (not error < 1e-2))
        print(f"{name:22}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    print(f"the first of a new length: cudnn {_first_ms('cudnn'):.1f} ms, triton {_first_ms('triton'):.1f} ms")
    best = min(at_seed, key=at_seed.__getitem__)
    figures.emit(
        "vision.attention_seed.ms",
        round(at_seed[best], 4),
        "ms",
        'make bench NAME=attention ARGS="--pictures"',
        way=best,
        ways={name: round(ms, 4) for name, ms in at_seed.items()},
        seeds_table_4090d=SEEDS_TABLE,
    )


def _random(lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Query, key and value as the tower has them: views of one product."""
    qkv = torch.randn(sum(lengths), 3, HEADS, SIZE, device=DEVICE, dtype=DTYPE)
    return qkv.unbind(1)


def _checked(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, length) of the first and the last picture."""
    return [(0, lengths[0]), (sum(lengths) - lengths[-1], lengths[-1])]


def _exact(lengths: Sequence[int], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of those pictures the last 300 rows, computed in float32."""
    found = []
    for begin, length in _checked(lengths):
        query, key, value = (rows[begin : begin + length].float().transpose(0, 1) for rows in inputs)
        weights = (query[:, -300:] @ key.mT * SIZE**-0.5).softmax(-1)
        found.append((weights @ value).transpose(0, 1).flatten(1))
    return found


def _error(
    attend: Attend, inputs: Sequence[torch.Tensor], lengths: Sequence[int], exact: Sequence[torch.Tensor]
) -> float:
    rows = attend(*inputs)
    errors = []
    for (begin, length), expected in zip(_checked(lengths), exact, strict=True):
        given = rows[begin : begin + length][-300:].float()
        errors.append(float((given - expected).norm() / expected.norm()))
    return max(errors)


def _first_ms(name: str) -> float:
    """What the first call at another length takes, plans of libraries included."""
    cudnn = partial(attend_within, backend=SDPBackend.CUDNN_ATTENTION)
    way: Within = cudnn if name == "cudnn" else partial(attend_in_triton, plan=PLANS[0])
    lengths = [2036] * 2
    inputs = _random(lengths)
    torch.cuda.synchronize()
    started = time.perf_counter()
    way(lengths, DEVICE)(*inputs)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started)
