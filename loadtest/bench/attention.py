"""The vision tower's attention within pictures on one GPU: ours beside what others offer (`make bench NAME=attention`).

16 heads of 80 values, as MinerU2.5's tower has them: one picture of 7,956 patches, which is the shape of a published
table of an RTX 4090D (`seed`), the batches of W5a and W5b, and a page with 60 crops. In bfloat16; FlashAttention-3 in
e4m3 as well, its operands quantized before, which ours cannot. It takes part where a package that has it is installed
(`pip install --no-deps fa3_fwd==0.0.3`, `sglang-kernel==0.4.5`).

In turns, each in a CUDA graph. `vision.attention_<batch>.ms` is the fastest of ours; its notes have the times of all
and their errors against float32. `.<way>_over_ours` is another's time over it. A minute, most of which compiles.

    python loadtest/bench attention
    python loadtest/bench attention --device cpu                a trial on short pictures: `trial.vision.*`
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any

import figures
import numpy as np
import torch
from turns import ratio

from bench.kernel_case import error
from bench.vision import milliseconds
from tessera.kernels.fp8_rows import E4M3, LARGEST
from tessera.kernels.tower_layers import varlen_backends
from tessera.kernels.tuning import graph_milliseconds

HEADS, HEAD_DIM = 16, 80
BATCHES = {
    "seed": [7956],
    "w5a": [5476] * 5,
    "w5b": [1024] * 32,
    "crops": [5476, *(4 * np.random.default_rng(0).integers(8, 150, 60)).tolist()],
}
SHORT = 64
"""A trial's pictures have this many times fewer patches."""
PUBLISHED = {"sgl_kernel": 2.711, "xFormers": 2.791, "SDPA": 2.906}
"""Milliseconds at the first shape on an RTX 4090D."""
TURNS = 6
LAST = 300
FLASH_3 = {"fa3": "fa3_fwd_interface", "sgl_kernel": "sgl_kernel.flash_attn"}
"""Who has FlashAttention-3, and where."""

Inputs = Sequence[torch.Tensor]
Way = Callable[[Sequence[int], Inputs], Callable[[], torch.Tensor]]


def ways(device: torch.device) -> dict[str, Way]:
    """By name; ours end in their plans."""

    def of(backend: Any, lengths: Sequence[int], inputs: Inputs) -> Callable[[], torch.Tensor]:
        return partial(backend(lengths, device), *inputs)

    found: dict[str, Way] = {
        name.replace(" ", "_"): partial(of, backend) for name, backend in varlen_backends(device, True).items()
    }
    for name, module in FLASH_3.items():
        if device.type == "cuda" and importlib.util.find_spec(module.partition(".")[0]):
            attend = importlib.import_module(module).flash_attn_varlen_func
            way = partial(flash_attention_3, attend)
            found |= {name: way, f"{name}_e4m3": partial(way, e4m3=True)}
    return found


def flash_attention_3(
    attend: Callable[..., torch.Tensor], lengths: Sequence[int], inputs: Inputs, e4m3: bool = False
) -> Callable[[], torch.Tensor]:
    scales = {}
    if e4m3:
        quantized = [in_e4m3(rows, lengths) for rows in inputs]
        inputs = [values for values, _ in quantized]
        scales = {f"{name}_descale": scale for name, (_, scale) in zip("qkv", quantized)}
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=inputs[0].device)
    most = max(lengths)
    return lambda: attend(*inputs, ends, ends, most, most, **scales).flatten(1)


def in_e4m3(rows: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows [n, heads, values] divided by a scale for each picture and head, float32 [pictures, heads]."""
    parts = rows.float().split(list(lengths))
    scales = torch.stack([part.abs().amax((0, 2)) / LARGEST for part in parts])
    return torch.cat([part / scale[:, None] for part, scale in zip(parts, scales)]).to(E4M3), scales


def wrong(rows: torch.Tensor, inputs: Inputs, lengths: Sequence[int]) -> float:
    """The larger error of the last rows of the first and of the last picture, against float32."""
    found = []
    for begin, length in ((0, lengths[0]), (sum(lengths) - lengths[-1], lengths[-1])):
        picture = slice(begin, begin + length)
        query, key, value = (each[picture].float().transpose(0, 1) for each in inputs)
        weights = (query[:, -LAST:] @ key.mT * HEAD_DIM**-0.5).softmax(-1)
        found.append(error(rows[picture][-LAST:], (weights @ value).transpose(0, 1).flatten(1)))
    return max(found)


def report(name: str, times: Mapping[str, list[float]], **notes: Any) -> None:
    """Emits the fastest of ours and how much longer each of the others takes."""
    ms = {way: round(median(each), 4) for way, each in times.items()}
    ours = [way for way in ms if way.startswith(("triton", "gluon"))] or [*ms]  # a CPU has none of ours
    best = min(ours, key=ms.__getitem__)
    figures.emit(f"{name}.ms", ms[best], "ms", way=best, ways=ms, **notes)
    for way in (way for way in ms if way not in ours):
        over = ratio(times[way], times[best])
        figures.emit(f"{name}.{way}_over_ours", round(over.value, 4), "ratio", ci95=round(over.ci95, 4), turns=TURNS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", nargs="+", choices=BATCHES, default=[*BATCHES])
    options = parser.parse_args()
    device, on_gpu = torch.device(options.device), options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit("attention: needs a GPU, and this machine has none; a trial without: --device cpu")
    print("about a minute on an H200", file=sys.stderr, flush=True)
    clock = graph_milliseconds if on_gpu else partial(milliseconds, device=device, repeats=3)
    prefix, known = "" if on_gpu else "trial.", ways(device)
    for batch in options.batches:
        lengths = [length if on_gpu else -(-length // SHORT) for length in BATCHES[batch]]
        qkv = torch.randn(sum(lengths), 3, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        inputs = qkv.unbind(1)  # as the tower has them: views of one product
        calls, errors, times = {}, {}, {}
        with torch.inference_mode():
            for name, way in known.items():
                try:
                    call = way(lengths, inputs)
                    errors[name] = round(wrong(call(), inputs, lengths), 5)
                except Exception as refusal:  # any library's own error: a way that cannot do it here
                    print(f"{batch}: {name}: {str(refusal)[:80]}", file=sys.stderr, flush=True)
                    continue
                calls[name], times[name] = call, []
            for _ in range(TURNS):
                for name, call in calls.items():
                    times[name].append(clock(call))
        published = {"published_4090d": PUBLISHED} if batch == "seed" else {}
        report(f"{prefix}vision.attention_{batch}", times, errors=errors, **published)
    return 0
