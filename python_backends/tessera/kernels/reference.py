"""What the kernels compute, in plain torch: the same names, arguments and roundings."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from tessera.kernels.fp8_rows import Fp8Rows, fp8_linear, quantize_rows, rescale
from tessera.kernels.operands import (
    MAX_ROWS,
    Allowed,
    DeferredProduct,
    HeadNorms,
    Operand,
    PagedCache,
    Partials,
    PenaltyLines,
    Routing,
    StoredWeights,
    finished,
)
from tessera.kernels.w4_layout import PackedW4, unpack


def add_rms_norm(
    x: torch.Tensor | DeferredProduct,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    fp8: bool = False,
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
    """x, residual [n, size], weight [size] -> (normalised, residual); residual is changed in place, None means x.

    ``fp8``: the normalised rows leave quantized.
    """
    x = finished(x)
    residual = x if residual is None else residual.add_(x)
    normalised = F.rms_norm(residual.float(), (x.shape[-1],), None, eps).to(x.dtype)
    scaled = weight * normalised
    return quantize_rows(scaled) if fp8 else scaled, residual


def likeliest(logits: torch.Tensor, allowed: Allowed | None = None) -> torch.Tensor:
    """logits of any float dtype [m, vocabulary] -> int64 [m], of those ``allowed``, of several equal ones the first; -1
    for a row with any NaN or infinity."""
    lowest, highest = logits.aminmax(dim=-1)
    if allowed is not None:
        lines, bits = allowed
        eight = torch.arange(8, dtype=torch.uint8, device=bits.device)
        each = (bits[lines.clamp(min=0)][:, :, None] >> eight & 1).flatten(1)[:, : logits.shape[1]]
        logits = logits.masked_fill((each == 0) & (lines >= 0)[:, None], float("-inf"))
    return torch.where(highest - lowest < float("inf"), logits.argmax(dim=-1), -1)


def penalized(logits: torch.Tensor, lines: PenaltyLines, rows: torch.Tensor) -> torch.Tensor:
    """logits of any float dtype [m, vocabulary] -> float32, changed for ``rows`` by their ``lines``."""
    scores, nobody = logits.to(torch.float32, copy=True), logits.shape[1]
    rows = rows[:, rows[2] > 0]  # of the others, which may fill up a graph's, nothing is known
    places, slots, lengths = rows[:3]
    (prompts, sizes), lengths = lines.facts[:, slots, None], lengths[:, None]
    repetition, frequency, presence = lines.amounts[:, slots, None]
    at = torch.arange(int(lengths.amax()) if len(lengths) else 0, device=logits.device)
    held = lines.tokens[slots, : len(at)].long()
    known = (held >= 0) & (at < lengths)
    index = held.where(known, nobody)  # a column behind all takes what is none
    changed = F.pad(scores[places], (0, 1))
    counts = torch.zeros_like(changed).scatter_add_(1, index, (at >= prompts).float()).gather(1, index)
    values = changed.gather(1, index)
    values = torch.where(values < 0, values * repetition, values / repetition)
    values -= frequency * counts
    values -= torch.where(counts > 0, presence, 0.0)
    changed.scatter_(1, index, values)  # a token's places all hold the same value
    if ((sizes > 0) & (sizes <= lengths)).any():
        echoes = _echoes(lines, rows).gather(1, (lengths - 1 - at).clamp(min=0))
        ends = (sizes > 0) & (echoes >= sizes - 1)
        changed.scatter_(1, index.where(ends, nobody), torch.finfo(torch.float32).min)
    return scores.index_copy_(0, places, changed[:, :-1])


def append_tokens(lines: PenaltyLines, rows: torch.Tensor, chosen: torch.Tensor) -> None:
    """Puts behind each line the one of ``chosen`` int64 [m] that follows all of its draft that was right, and lengthens
    its echoes."""
    wrong = (chosen[rows[0]] != rows[5]).long()
    before = wrong.cumsum(0) - wrong
    first = torch.arange(len(wrong), device=rows.device) - rows[3]
    rows = rows[:, (wrong > 0) & (before == before[first])]
    places, slots, lengths = rows[:3]
    found = _echoes(lines, rows)
    lines.tokens[slots, lengths] = chosen[places].int()
    lines.echoes[slots, 1 : found.shape[1] + 1] = _longer(lines, found, slots, lengths)


def _echoes(lines: PenaltyLines, rows: torch.Tensor) -> torch.Tensor:
    """int32 [r, longest] for the distances 1..longest, a draft's tokens among the rows' own."""
    slots, lengths, drafted = rows[1:4]
    line, owner = slots.unique(return_inverse=True)  # each of them has several rows behind its draft
    begun, most = lengths.new_zeros(len(line)).scatter_(0, owner, lengths - drafted)[:, None], int(drafted.max())
    distance, end = torch.arange(1, int(lengths.max()) + 1, device=slots.device), lines.tokens.shape[1] - 1
    echoes = lines.echoes[line, 1 : len(distance) + 1].where(distance < begun, 0)
    found = echoes[owner]
    backwards = begun + most - 1 - torch.arange(most + len(distance), device=slots.device)
    tokens = lines.tokens[line[:, None], backwards.clamp(min=0, max=end)]
    for count in range(1, most + 1):
        last, earlier = tokens[:, most - count, None], tokens[:, most - count + 1 :][:, : len(distance)]
        echoes = (echoes + 1).where((earlier == last) & (distance < begun + count), 0)
        ours = drafted == count
        found[ours] = echoes[owner[ours]]
    return found


def _longer(lines: PenaltyLines, echoes: torch.Tensor, slots: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """``echoes`` [r, longest] of the tokens in front of the places ``at`` [r] -> of those up to there."""
    before = at[:, None] - torch.arange(1, echoes.shape[1] + 1, device=at.device)
    same = lines.tokens[slots[:, None], before.clamp(min=0)] == lines.tokens[slots, at][:, None]
    return (echoes + 1).where(same & (before >= 0), 0)


def norm_heads(queries: torch.Tensor, keys: torch.Tensor, norms: HeadNorms) -> None:
    """Normalises heads [n, heads, d] in place."""
    for heads, weight in ((queries, norms.queries), (keys, norms.keys)):
        normalised = F.rms_norm(heads.float(), weight.shape, None, norms.eps).to(heads.dtype)
        torch.mul(weight, normalised, out=heads)


def silu_and_multiply(
    gate_up: torch.Tensor, fp8: bool = False, scales: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor | Fp8Rows:
    """[n, 2 * size], gate first -> silu(gate) * up [n, size]; ``fp8``: quantized.

    ``scales``: gate_up is a product of e4m3 values that still lacks those of its rows [n, 1] and columns [2 * size].
    """
    if scales is not None:
        gate_up = rescale(gate_up, *scales, None)
    gate, up = gate_up.chunk(2, dim=-1)
    product = F.silu(gate).mul_(up)
    return quantize_rows(product) if fp8 else product


def rotate_and_store(
    qkv: torch.Tensor | DeferredProduct,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    cache: PagedCache,
    heads: int,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Rotates q and k inside qkv [n, (heads + 2 * kv_heads) * d], stores k and v at slots int64 [n] unless negative.

    cos, sin float32 [n, d / 2]. A deferred product is finished first, and with ``norms`` heads of q and k are
    normalised. Returns qkv.
    """
    qkv = finished(qkv)
    kv_heads, size = cache.keys.shape[2:]
    split = qkv.view(qkv.shape[0], heads + 2 * kv_heads, size)
    rotated = split[:, : heads + kv_heads]
    if norms is not None:
        norm_heads(rotated[:, :heads], rotated[:, heads:], norms)
    first, second = rotated.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
    stored = slots >= 0
    new_keys, new_values = split[stored, heads:].split(kv_heads, dim=1)
    for target, scales, new in (
        (cache.keys, cache.key_scales, new_keys),
        (cache.values, cache.value_scales, new_values),
    ):
        if scales is not None:
            rows = quantize_rows(new.reshape(-1, size).contiguous())
            scales.view(-1, kv_heads)[slots[stored]] = rows.scales.view(-1, kv_heads)
            target, new = target.view(torch.uint8), rows.values.view(torch.uint8).view(new.shape)
        target.view(-1, kv_heads, size)[slots[stored]] = new
    return qkv


def apply_rotary(qkv: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv [patches, 3, heads, size] of any floating dtype -> query, key and value [patches, heads, size], pair i (i and
    size / 2 + i) of the first two turned by the angle whose cosine and sine are turns[:, patch, i], in float32.
    """
    first, second = qkv[:, :2].float().chunk(2, dim=-1)
    cosine, sine = turns[:, :, None, None]
    rows = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(qkv.dtype)
    return rows[:, 0], rows[:, 1], qkv[:, 2]


def add_and_norm(
    x: torch.Tensor, update: torch.Tensor | None, norm: nn.Module, fp8: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and update [..., size] -> (norm(x + update), x + update). ``fp8``: the kernel would quantize the first."""
    x = x if update is None else x + update
    return norm(x), x


def skinny_deferred(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Partials:
    """x [m, k], weight [n, k], bias [n] -> [m, n] in two halves of k, still to be added."""
    x_halves, weight_halves = x.float().chunk(2, dim=1), weight.float().chunk(2, dim=1)
    return Partials(torch.stack([F.linear(*halves) for halves in zip(x_halves, weight_halves)]), bias, x.dtype)


def early_linear(
    x: Operand,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [m, k], weight [n, k], bias [n] -> x W^T + b [m, n], added to ``residual`` in place if there is one."""
    product = F.linear(_normed(x), weight, bias)
    return product if residual is None else residual.add_(product)


def early_gate_up(x: Operand, weight: torch.Tensor) -> torch.Tensor | Fp8Rows:
    """x [m, k], weight [2 * size, k], gate first -> silu(gate) * up [m, size]."""
    return gate_up_silu(_normed(x), weight)


def _normed(x: Operand) -> torch.Tensor:
    assert not isinstance(x, Fp8Rows)
    if isinstance(x, torch.Tensor):
        return x
    normal, _ = add_rms_norm(x.stream, None, x.weight, x.eps)
    assert isinstance(normal, torch.Tensor)
    return normal


def gate_up_silu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | Fp8Rows:
    """x [m, k], weight [2 * size, k], gate first -> silu(gate) * up [m, size]."""
    return silu_and_multiply(F.linear(x, weight))


#: the same for few rows
skinny_gate_up = gate_up_silu


#: x of few rows e4m3, weight e4m3 [n, k], scales float32 [n], bias [n], dtype -> [m, n]
skinny_fp8 = fp8_linear

#: x [..., k], weight [n, k], bias [n] or None -> [..., n]
row_linear = F.linear


def row_product(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x [m, k], weight [n, k], where in e4m3 with ``scales`` float32 [n], bias [n] -> [m, n] of ``dtype``."""
    if isinstance(x, Fp8Rows):
        assert scales is not None
        return fp8_linear(x, weight, scales, bias, dtype)
    return F.linear(x, weight, bias)


def w4a16_linear(x: torch.Tensor, weights: PackedW4, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [m, k], W [n, k], bias [n] -> [m, n]; W is not rounded, sums are float32."""
    return F.linear(x.float(), unpack(weights), None if bias is None else bias.float()).to(x.dtype)


def w4a16_gate_up(x: torch.Tensor, weights: PackedW4, bias: torch.Tensor | None = None) -> torch.Tensor | Fp8Rows:
    """x [m, k], W [2 * size, k], gate first -> silu(gate) * up [m, size]."""
    return silu_and_multiply(w4a16_linear(x, weights, bias))


def widen_w4(weights: PackedW4, dtype: torch.dtype) -> torch.Tensor:
    """W [n, k]."""
    return unpack(weights).to(dtype)


def route(logits: torch.Tensor, picked: int, normalize: bool) -> Routing:
    """logits [tokens, experts] -> each token's ``picked`` likeliest experts, of equal ones the first.

    A softmax over all experts in float32; ``normalize``: the weights of a token sum to one. They are rounded to the
    logits' dtype.
    """
    likely, ids = logits.softmax(-1, torch.float32).sort(dim=-1, descending=True, stable=True)
    weights, (ids, pairs) = likely[:, :picked], ids[:, :picked].flatten().sort(stable=True)
    bounds = torch.searchsorted(ids, torch.arange(logits.shape[1] + 1, device=ids.device))
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(pairs.int(), bounds.int(), weights.to(logits.dtype))


def grouped_gate_up(x: torch.Tensor | Fp8Rows, weights: StoredWeights, routing: Routing) -> torch.Tensor | Fp8Rows:
    """x [tokens, k], weights [experts * 2 * size, k], of each expert gate first -> silu(gate) * up [pairs, size], in
    the order of ``routing.pairs``."""
    product = _grouped(_plain(x)[routing.pairs // routing.weights.shape[1]], weights, routing.bounds)
    return silu_and_multiply(product.to(routing.weights.dtype))


def grouped_down(x: torch.Tensor | Fp8Rows, weights: StoredWeights, routing: Routing) -> Partials:
    """x [pairs, k], weights [experts * n, k] -> [tokens, n], the sum of each token's pairs by their weights."""
    product, (tokens, picked) = _grouped(_plain(x), weights, routing.bounds), routing.weights.shape
    weighted = torch.empty_like(product)
    weighted[routing.pairs] = product * routing.weights.float().flatten()[routing.pairs, None]
    parts = weighted.unflatten(0, (tokens, picked)).transpose(0, 1).contiguous()
    return Partials(parts.to(routing.weights.dtype) if tokens > MAX_ROWS else parts, None, routing.weights.dtype)


def _grouped(rows: torch.Tensor, weights: StoredWeights, bounds: torch.Tensor) -> torch.Tensor:
    """rows [pairs, k], of each expert between its ``bounds``, by its weights -> float32 [pairs, n]."""
    experts = _plain(weights).unflatten(0, (len(bounds) - 1, -1))
    product = torch.empty((len(rows), experts.shape[1]), dtype=torch.float32, device=rows.device)
    for weight, (begin, end) in zip(experts, pairwise(bounds.tolist())):
        if begin < end:
            product[begin:end] = F.linear(rows[begin:end].float(), weight.float())
    return product


def _plain(stored: StoredWeights) -> torch.Tensor:
    if isinstance(stored, Fp8Rows):
        return stored.dequantized()
    return unpack(stored) if isinstance(stored, PackedW4) else stored
