"""The root-mean-square normalisation of single heads (Qwen3's q/k norm) inside fused q, k and v."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.fp8.early_launch import early_launch, wait_for_previous


def norm_heads(qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, kv_heads: int, eps: float) -> None:
    """Normalises each head of q and k in place in qkv [n, (heads + 2 * kv_heads) * d]; the weights are [d].

    All are contiguous and of one dtype, else ValueError. Statistics are float32; a normalised value is rounded to the
    dtype before it meets the weight.
    """
    size = len(q_weight)
    heads = qkv.shape[1] // size - 2 * kv_heads
    if heads < 1 or qkv.shape[1] % size:
        raise ValueError(f"norm_heads: {qkv.shape[1]} values a row are no heads of {size} beside 2 * {kv_heads}")
    tensors = (qkv, q_weight, k_weight)
    if not all(x.is_contiguous() and x.dtype == qkv.dtype for x in tensors) or q_weight.shape != k_weight.shape:
        raise ValueError("norm_heads: qkv and the weights of d values each must be contiguous and of one dtype")
    head_block, block = triton.next_power_of_2(heads + kv_heads), triton.next_power_of_2(size)
    if len(qkv):
        _norm_heads[(len(qkv),)](
            qkv,
            q_weight,
            k_weight,
            qkv.shape[1],
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            SIZE=size,
            HEAD_BLOCK=head_block,
            BLOCK=block,
            num_warps=min(max(head_block * block // 2048, 1), 16),  # 64 values a thread
            **early_launch(qkv.device),
        )


@triton.jit
def _norm_heads(
    qkv,
    q_weight,
    k_weight,
    width,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a token: its heads are neighbours in memory."""
    wait_for_previous(EARLY)
    row = qkv + tl.program_id(0).to(tl.int64) * width
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS + KV_HEADS) & (column < SIZE)
    dtype = qkv.dtype.element_ty
    of_q = tl.load(q_weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    values = tl.load(row + head * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    mean_of_squares = tl.sum(values * values, 1) / SIZE
    normalised = (values * tl.rsqrt(mean_of_squares + eps)[:, None]).to(dtype).to(tl.float32)
    scaled = normalised * tl.where(head < HEADS, of_q, of_k)
    tl.store(row + head * SIZE + column, scaled.to(dtype), mask=inside)
