"""The norms of single heads of q and k (Qwen3's), rotary embedding and the write to the paged cache, in one launch.

Queries and keys turned by the place of their patch, in place and in one pass: a read and a write a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.kernels.early_linear import early_rotate
from tessera.kernels.fp8 import early_launch, inverse_of, scale_of, wait_for_previous
from tessera.kernels.operands import DeferredProduct, EarlyProduct, HeadNorms, PagedCache, Partials


def rotate_and_store(
    qkv: torch.Tensor | DeferredProduct,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    cache: PagedCache,
    heads: int,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Rotates q and k in place in qkv, and copies the rotated k and the v to their slots of the cache. Returns qkv.

    With ``norms`` each head of q and k is normalised first: statistics are float32, and a normalised value is rounded
    to the dtype before it meets the weight, as their product is.

    qkv [n, (heads + 2 * kv_heads) * d]; cos, sin float32 [n, d / 2] rotate the first half of a head against its
    second; slots int64 [n], each ``block * block_size + offset``, negative where nothing is to be stored (a padded
    graph's dummy rows); a cache of qkv's dtype, or in e4m3: then its scales are set as
    :func:`tessera.kernels.fp8_rows.quantize_rows` does for a head. All are contiguous, else ValueError, as for a qkv of
    another width. The rotation is float32 and rounded once.

    A deferred product is finished and rounded first, an FP8 product's sums in their own memory.
    """
    if isinstance(qkv, EarlyProduct) and qkv.weight.itemsize == 2 and norms is None and cache.key_scales is None:
        return early_rotate(qkv, cos, sin, slots, cache, heads)
    x_scales = scales = bias = None
    if isinstance(qkv, Partials | EarlyProduct):
        qkv = qkv.product()  # by many programs: one a token would take longer to fetch them (measured on an H200)
    elif not isinstance(qkv, torch.Tensor):
        qkv, x_scales, scales, bias = qkv
    n, (kv_heads, size) = len(qkv), cache.keys.shape[2:]
    if qkv.shape[1] != (heads + 2 * kv_heads) * size:
        raise ValueError(f"rotate_and_store: {qkv.shape[1]} values a row are not {heads} + 2 * {kv_heads} of {size}")
    if norms is not None and not all(norm.shape == (size,) and norm.dtype == qkv.dtype for norm in norms[:2]):
        raise ValueError(f"rotate_and_store: norms of heads must have {size} weights of {qkv.dtype}")
    given = (qkv, cos, sin, slots, *cache, x_scales, scales, bias, *(norms[:2] if norms else (None, None)))
    if not all(tensor.is_contiguous() for tensor in given if tensor is not None):
        raise ValueError("rotate_and_store: every tensor must be contiguous")
    if n:
        _rotate_and_store[(n,)](
            *given,
            norms.eps if norms else 0.0,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=size // 2,
            num_warps=4,
            **early_launch(qkv.device),
        )
    return qkv


@triton.jit
def _rotate_and_store(
    qkv, cos, sin, slots, keys, values, key_scales, value_scales, x_scales, scales, bias, q_norm, k_norm, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program a token: its angles are read once, and q, k and v are neighbours in memory."""
    wait_for_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * HALF
    row = qkv + token * WIDTH
    slot = tl.load(slots + token)
    stored = slot >= 0
    cache_row = slot * (KV_HEADS * 2 * HALF)

    angle = tl.arange(0, triton.next_power_of_2(HALF))
    cosine = tl.load(cos + token * HALF + angle, mask=angle < HALF, other=0.0)[None, :]
    sine = tl.load(sin + token * HALF + angle, mask=angle < HALF, other=0.0)[None, :]

    head = tl.arange(0, triton.next_power_of_2(HEADS + KV_HEADS))[:, None]
    inside = (head < HEADS + KV_HEADS) & (angle < HALF)[None, :]
    at = head * (2 * HALF) + angle[None, :]
    first = _load_finished(qkv, x_scales, scales, bias, token, at, inside, WIDTH)
    second = _load_finished(qkv, x_scales, scales, bias, token, at + HALF, inside, WIDTH)
    if q_norm is not None:
        dtype = qkv.dtype.element_ty
        shrink = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
        weight = _of_either(q_norm, k_norm, angle, head < HEADS, HALF)
        first = ((first * shrink).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        weight = _of_either(q_norm + HALF, k_norm + HALF, angle, head < HEADS, HALF)
        second = ((second * shrink).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)

    kv_head = tl.arange(0, triton.next_power_of_2(KV_HEADS))[:, None]
    v_inside = (kv_head < KV_HEADS) & (angle < HALF)[None, :]
    v_at = kv_head * (2 * HALF) + angle[None, :]
    v_column = (HEADS + KV_HEADS) * 2 * HALF + v_at
    v_first = _load_finished(qkv, x_scales, scales, bias, token, v_column, v_inside, WIDTH)
    v_second = _load_finished(qkv, x_scales, scales, bias, token, v_column + HALF, v_inside, WIDTH)
    if x_scales is not None:
        tl.store(row + v_column, v_first.to(qkv.dtype.element_ty), mask=v_inside)
        tl.store(row + v_column + HALF, v_second.to(qkv.dtype.element_ty), mask=v_inside)

    rotated_first = (first * cosine - second * sine).to(qkv.dtype.element_ty)
    rotated_second = (second * cosine + first * sine).to(qkv.dtype.element_ty)
    tl.store(row + at, rotated_first, mask=inside)
    tl.store(row + at + HALF, rotated_second, mask=inside)

    k_at = keys + cache_row + at - HEADS * 2 * HALF
    k_inside = inside & (head >= HEADS) & stored
    if key_scales is not None:
        k_scale = _scale_of_heads(rotated_first, rotated_second)
        v_scale = _scale_of_heads(v_first, v_second)
        is_key = (head >= HEADS) & (head < HEADS + KV_HEADS) & stored
        tl.store(key_scales + slot * KV_HEADS + head - HEADS, k_scale, mask=is_key)
        tl.store(value_scales + slot * KV_HEADS + kv_head, v_scale, mask=(kv_head < KV_HEADS) & stored)
        k_inverse, v_inverse = inverse_of(k_scale), inverse_of(v_scale)
        rotated_first = rotated_first.to(tl.float32) * k_inverse
        rotated_second = rotated_second.to(tl.float32) * k_inverse
        v_first, v_second = v_first * v_inverse, v_second * v_inverse
    tl.store(k_at, rotated_first.to(keys.dtype.element_ty), mask=k_inside)
    tl.store(k_at + HALF, rotated_second.to(keys.dtype.element_ty), mask=k_inside)
    v_cache = values + cache_row + v_at
    tl.store(v_cache, v_first.to(values.dtype.element_ty), mask=v_inside & stored)
    tl.store(v_cache + HALF, v_second.to(values.dtype.element_ty), mask=v_inside & stored)


@triton.jit
def _load_finished(qkv, x_scales, scales, bias, token, column, inside, WIDTH: tl.constexpr):
    """Columns of a token's q, k and v, rounded to qkv's dtype, as float32."""
    at = token * WIDTH + column
    value = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
    if x_scales is not None:
        value *= tl.load(x_scales + token) * tl.load(scales + column, mask=inside, other=0.0)
    if bias is not None:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return value.to(qkv.dtype.element_ty).to(tl.float32)


@triton.jit
def _of_either(q_norm, k_norm, column, is_query, HALF: tl.constexpr):
    """The weights of half a head, of the queries' norm or the keys', float32 [heads, half]."""
    of_q = tl.load(q_norm + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    of_k = tl.load(k_norm + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_query, of_q, of_k)


@triton.jit
def _scale_of_heads(first, second):
    """Both halves of heads, [heads, half] each -> their scales [heads, 1]."""
    largest = tl.maximum(tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32)))
    return scale_of(tl.max(largest, 1, keep_dims=True))


_MAX_PAIRS = 16384  # of a patch


def apply_rotary(qkv: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv [patches, 3, heads, size], contiguous, of any floating dtype -> its queries, keys and values, the first two
    turned in place as by :func:`tessera.kernels.reference.apply_rotary`; turns float32 [2, patches, size / 2].

    ValueError for other shapes, or over 16384 pairs a patch.
    """
    patches, parts, heads, size = qkv.shape
    if not (qkv.is_contiguous() and turns.is_contiguous()) or turns.shape != (2, patches, size // 2) or parts != 3:
        raise ValueError(f"apply_rotary: contiguous qkv and turns of one number of patches, not {[*qkv.shape]}")
    pairs, half = triton.next_power_of_2(2 * heads), triton.next_power_of_2(size // 2)
    if pairs * half > _MAX_PAIRS:
        raise ValueError(f"apply_rotary: at most {_MAX_PAIRS} pairs a patch, not {pairs} x {half}")
    if patches:
        # 16 pairs a thread: two loads of 16 bytes of either half in flight.
        warps = min(max(pairs * half // 512, 1), 16)
        _apply_rotary[(patches,)](qkv, turns, patches, heads, size // 2, HEADS=pairs, HALF=half, num_warps=warps)
    return qkv[:, 0], qkv[:, 1], qkv[:, 2]


@triton.jit(do_not_specialize=["patches"])
def _apply_rotary(qkv, turns, patches, heads, half: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    """One program a patch; its queries' heads and its keys' lie beside each other."""
    patch = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < 2 * heads) & (column < half)
    at = qkv + patch * (3 * heads * 2 * half) + head * (2 * half) + column
    cosine = tl.load(turns + patch * half + column, mask=column < half, other=0.0)
    sine = tl.load(turns + (patches + patch) * half + column, mask=column < half, other=0.0)
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (first * cosine - second * sine).to(qkv.dtype.element_ty), mask=inside)
    tl.store(at + half, (second * cosine + first * sine).to(qkv.dtype.element_ty), mask=inside)
