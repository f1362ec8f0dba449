"""Attention of the vision towers: every token sees every token of its own tile or picture.

torch's scaled_dot_product_attention, with torch's own choice of the kernel (on the CPU its flash kernel) or a given
one, or a kernel for pictures of any sizes: which is the fastest depends on the GPU and the tokens; a tower measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from itertools import accumulate, groupby
from typing import cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tessera.kernels.fp8_rows import Fp8Rows
from tessera.kernels.operands import AttentionPlan, HopperPlan, query_tiles
from tessera.kernels.transfer import to_device

# The kernels that torch has for GPUs, without the one that writes all scores to memory.
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
CLASS_APART = "class apart"
#: that are written out together, on a CPU, 8 MiB; of pictures with more a head torch's kernel takes less time
MOST_SCORES = 1 << 21
#: query, key, value -> rows
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
#: How many patches each picture has, and their device -> attention of pictures that lie one after the other: every
#: patch sees every patch of its own. What follows from the lengths is made once, for all layers. The function takes
#: query, key and value [patches, heads, head size] and gives [patches, heads * head size].
VarlenAttention = Callable[[Sequence[int], torch.device], Attend]
_ROOM: ContextVar[bool] = ContextVar("room", default=False)


@contextmanager
def leaving_room(room: bool) -> Iterator[None]:
    """Within it kernels of ours that would hold every multiprocessor of the GPU to their end leave 3 in 10 to other
    processes, if there is to be ``room``. Results are the same, bit for bit."""
    token = _ROOM.set(room)
    try:
        yield
    finally:
        _ROOM.reset(token)


def room_is_left() -> bool:
    """Within :func:`leaving_room`."""
    return _ROOM.get()


def with_room(plan: AttentionPlan | HopperPlan) -> AttentionPlan | HopperPlan:
    """The plan by which room is left; of other plans each program soon ends."""
    return replace(plan, programs=max(1, plan.programs * 7 // 10)) if isinstance(plan, HopperPlan) else plan


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: SDPBackend | None = None
) -> torch.Tensor:
    """Unmasked attention, scale 1/sqrt(head size).

    Each argument is [tiles, tokens, heads, head size] of one floating dtype (strides are free); the result is
    [tiles, tokens, heads * head size], contiguous. RuntimeError when the backend asked for cannot do it.
    """
    query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
    if query.is_cpu and query.dtype == torch.bfloat16 and query.shape[2] ** 2 <= MOST_SCORES:
        rows = _written_out(query, key, value)
    else:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            rows = scaled_dot_product_attention(query, key, value)
    # The GPU's kernels give their rows in the order of the queries', so that this is a view.
    return rows.transpose(1, 2).flatten(2)


def _written_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Two products and a softmax, of as many heads at a time as have MOST_SCORES; each [tiles, heads, tokens, head
    size]. torch's own kernel for CPUs does not multiply bfloat16 on all that can, and takes up to twice as long."""
    scaled, keys = query.flatten(0, 1) * query.shape[3] ** -0.5, key.flatten(0, 1).mT
    parts = (each.split(MOST_SCORES // query.shape[2] ** 2) for each in (scaled, keys, value.flatten(0, 1)))
    done = [q.matmul(k).softmax(-1).matmul(v) for q, k, v in zip(*parts)]
    return torch.cat(done).unflatten(0, query.shape[:2])


def attend_within(lengths: Sequence[int], device: torch.device, backend: SDPBackend | None = None) -> Attend:
    """:data:`VarlenAttention` by :func:`attend`, neighbours of equal length together."""
    runs = [(length, len(list(equal))) for length, equal in groupby(lengths)]

    def attend_pictures(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        done, start = [], 0
        for length, count in runs:
            of_run = slice(start, start + length * count)
            parts = [rows[of_run].unflatten(0, (count, length)) for rows in (query, key, value)]
            done.append(attend(parts[0], parts[1], parts[2], backend).flatten(0, 1))
            start = of_run.stop
        return done[0] if len(done) == 1 else torch.cat(done)

    return attend_pictures


def attend_in_torch(lengths: Sequence[int], device: torch.device) -> Attend:
    """:data:`VarlenAttention` by torch's own kernel for any lengths, on GPUs, in 16 bits."""
    from torch.nn.attention.varlen import varlen_attn

    ends = to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
    most = max(lengths)

    def attend_pictures(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, varlen_attn(query, key, value, ends, ends, most, most)).flatten(1)

    return attend_pictures


def attend_in_triton(lengths: Sequence[int], device: torch.device, plan: AttentionPlan | HopperPlan) -> Attend:
    """:data:`VarlenAttention` by a kernel of ours."""
    attention = attention_by(plan)
    plan = with_room(plan) if room_is_left() else plan
    tiles = to_device(query_tiles(lengths, plan.rows), device)

    def attend_pictures(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attention(query, key, value, tiles, plan)

    return attend_pictures


def fixed_plan(device: torch.device) -> AttentionPlan | HopperPlan:
    """That of :func:`triton_configs` which serves where no picture's bits may depend on others."""
    *_, plan = triton_configs(device).values()
    return plan


def fixed_attention(tiles: int, tokens: int, device: torch.device) -> Attend:
    """As :func:`attend` on a GPU, of this many tiles, each by itself."""
    within = attend_in_triton([tokens] * tiles, device, fixed_plan(device))

    def attend_tiles(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows = within(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1))
        return rows.unflatten(0, (tiles, tokens))

    return attend_tiles


def attention_by(plan: AttentionPlan | HopperPlan) -> Callable[..., torch.Tensor]:
    """varlen_attention, or hopper_attention. ImportError where there is no Triton, or none with Gluon."""
    if isinstance(plan, HopperPlan):
        from tessera.kernels.hopper_attention import hopper_attention

        return hopper_attention
    from tessera.kernels.varlen_attention import varlen_attention

    return varlen_attention


def triton_configs(device: torch.device) -> dict[str, AttentionPlan | HopperPlan]:
    """Of attend_in_triton, by name; the more on a Hopper GPU."""
    from tessera.kernels.varlen_attention import PLANS

    plans: dict[str, AttentionPlan | HopperPlan] = {f"triton {plan}": plan for plan in PLANS}
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        plan = HopperPlan(torch.cuda.get_device_properties(device).multi_processor_count)
        plans[f"gluon {plan}"] = plan
    return plans


def attend_class_apart(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, fp8: bool = False
) -> torch.Tensor | Fp8Rows:
    """The same on a GPU, with token 0, the class token, computed apart; ``fp8``: with its rows quantized.

    cuDNN's kernel works in blocks of 128 tokens, so that a tile of 1 + 1024 costs it what one of 1152 does, for the
    queries and for the keys: 0.47 ms for 32 tiles of InternViT-300M on an H200, and 0.31 ms for their other tokens
    alone. What the class token sees and is to the others are two passes that memory bounds.
    """
    from tessera.kernels.merge_class import merge_class

    rest = (rows[:, 1:].transpose(1, 2) for rows in (query, key, value))
    # Its rows, and the logarithms of the softmax's sums.
    others, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*rest, None, True)
    first = attend(query[:, :1], key, value, SDPBackend.CUDNN_ATTENTION).unflatten(-1, query.shape[2:])
    others = others.transpose(1, 2).contiguous()  # which it is, in the order of the queries'
    return merge_class(first, others, sums.view(others.shape[0], others.shape[2], -1), query, key, value, fp8)
