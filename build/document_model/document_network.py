"""The forward passes on the modules (and so the weights) of the transformers model, for padded batches.

Written out because training wants the patches' states, grey pictures and a static shape; a test holds them equal to
transformers' own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from document_samples import COVERED, SIDES
from document_shape import IMAGE_MEAN, IMAGE_STD
from document_tokens import IM_END
from torch import nn
from transformers import Qwen2VLForConditionalGeneration


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """x [batch, heads, length, size] with its pairs (i, i + size / 2) turned; ``turns``: see :func:`_turns`."""
    cos, sin = turns.to(x.dtype)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _turns(angles: torch.Tensor) -> torch.Tensor:
    """Angles [batch, length, pairs] -> their cosine and sine [2, batch, 1, length, pairs]."""
    return torch.stack((angles.cos(), angles.sin()))[:, :, None]


def patch_states(
    model: Qwen2VLForConditionalGeneration,
    patches: torch.Tensor,
    places: torch.Tensor,
    lengths: torch.Tensor | None,
    gain: torch.Tensor | None = None,
) -> torch.Tensor:
    """Grey patches uint8 [batch, patches, 196] at ``places`` [batch, patches, 2] (row, column) to the tower's last
    states [batch, patches, width]. ``lengths`` [batch] says how many patches there are, None: all.

    ``gain`` float32 [batch, 2, 3] recolours for training: factors and offsets of the levels 0..1 of each channel.
    """
    tower, config = model.model.visual, model.config.vision_config
    mean, std = (torch.tensor(values, device=patches.device).view(1, 1, 3, 1) for values in (IMAGE_MEAN, IMAGE_STD))
    levels = patches[:, :, None].float() / 255
    if gain is not None:
        levels = (levels * gain[:, None, 0, :, None] + gain[:, None, 1, :, None]).clamp(0, 1)
    pixels = ((levels - mean) / std).expand(-1, -1, 3, -1).flatten(2)
    x = F.linear(pixels, tower.patch_embed.proj.weight.sum(2).flatten(1))
    quarter = config.embed_dim // config.num_heads // 4
    base = config.rope_parameters["rope_theta"]
    speeds = base ** -(torch.arange(quarter, device=x.device) / quarter)
    turns = _turns((places[..., None] * speeds).flatten(2))
    mask = None
    if lengths is not None:
        mask = (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[:, None, None]
    for block in tower.blocks:
        qkv = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, config.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = _turned(qkv[0], turns), _turned(qkv[1], turns)
        mixed = F.scaled_dot_product_attention(query, key, qkv[2], attn_mask=mask)
        x = x + block.attn.proj(mixed.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    return x


def image_rows(model: Qwen2VLForConditionalGeneration, states: torch.Tensor) -> torch.Tensor:
    """Patch states [batch, patches, width] to rows [batch, patches / 4, text width]."""
    merger = model.model.visual.merger
    return merger.mlp(merger.ln_q(states).unflatten(1, (-1, 4)).flatten(2))


@dataclass
class Cache:
    """Keys and values of each layer [batch, 1, length, size], and how many of them a sample has."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    used: torch.Tensor


def text_states(
    model: Qwen2VLForConditionalGeneration,
    x: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache | None = None,
) -> torch.Tensor:
    """Embeddings [batch, length, width] at ``positions`` [3, batch, length] to last hidden states, causally.

    With a ``cache``: one more token of each sample, or the first ones (where it is empty) of lengths ``cache.used``.
    """
    body, config = model.model.language_model, model.config.text_config
    size = config.hidden_size // config.num_attention_heads
    speeds = config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2, device=x.device) / size)
    angles = positions[..., None] * speeds
    sections = config.rope_parameters["mrope_section"]
    turns = _turns(torch.cat([part[axis] for axis, part in enumerate(angles.split(sections, dim=-1))], dim=-1))
    first = cache is not None and not cache.layers
    for index, layer in enumerate(body.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        query, key, value = (
            projection(normed).unflatten(-1, (-1, size)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key, mask = _turned(query, turns), _turned(key, turns), None
        if first and cache is not None:
            cache.layers.append((key, value))
        elif cache is not None:
            keys, values = cache.layers[index]
            samples = torch.arange(len(x), device=x.device)
            keys[samples, :, cache.used], values[samples, :, cache.used] = key[:, :, 0], value[:, :, 0]
            key, value = keys, values
            mask = (torch.arange(keys.shape[2], device=x.device) <= cache.used[:, None])[:, None, None]
        shape = (-1, query.shape[1], -1, -1)
        mixed = F.scaled_dot_product_attention(
            query, key.expand(shape), value.expand(shape), attn_mask=mask, is_causal=mask is None
        )
        x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return body.norm(x)


def embedded(
    model: Qwen2VLForConditionalGeneration,
    ids: torch.Tensor,
    rows: torch.Tensor,
    source: torch.Tensor,
    to: torch.Tensor,
) -> torch.Tensor:
    """Embeddings of ``ids`` [batch, length] with flat rows ``source`` put at the flat places ``to``, int64 [n] each."""
    x = model.model.language_model.embed_tokens(ids)
    return x.flatten(0, 1).index_copy(0, to, rows.flatten(0, 1)[source].to(x.dtype)).view_as(x)


BOX_WEIGHT = 10.0
"""Of distances in parts of a page, which count in hundredths."""


class DenseHead(nn.Module):
    """Reads from each patch which character has its middle there and the two before it; or which block covers it,
    whether one begins or ends there, and how far off its sides are. Training only; never saved with the model.

    The two before: what was answered last is how the text body finds its place in a picture. The tower knows distances
    only, so that the box itself, as an answer states it, is read from the text body's states of the rows.
    """

    def __init__(self, width: int, text_width: int, characters: int, kinds: int) -> None:
        super().__init__()
        self.character = nn.Linear(width, 3 * characters)
        self.layout = nn.Linear(width, kinds + 1 + 2 + 4)
        self.box = nn.Linear(text_width, 4)

    def layout_loss(self, states: torch.Tensor, rows: torch.Tensor, goal: torch.Tensor, places: torch.Tensor) -> Any:
        """Summed over patches: states [pages, patches, width], rows' last states [pages * patches / 4, text width],
        targets ``goal`` [pages, patches, 7] and ``places`` [pages, patches, 2] of whole square pages."""
        kinds, corners, distances = self.layout(states).float().split((self.layout.out_features - 6, 2, 4), dim=-1)
        covers = F.cross_entropy(kinds.flatten(0, 1), goal[..., COVERED].flatten().long(), reduction="sum")
        ends = F.binary_cross_entropy_with_logits(
            corners, goal[..., 1:3].float(), reduction="sum", pos_weight=corners.new_tensor(10.0)
        )
        covered, sides = (goal[..., COVERED] > 0)[..., None], goal[..., 3:].float() / SIDES
        middles = (places.flip(-1) + 0.5) / math.isqrt(goal.shape[1])
        near = (distances + middles.repeat(1, 1, 2) - sides).abs() * covered
        far = (self.box(rows).float() - sides[:, ::4].flatten(0, 1)).abs() * covered[:, ::4].flatten(0, 1)
        return covers + ends + BOX_WEIGHT * (near.sum() + 4 * far.sum())


@torch.inference_mode()
def generate(
    model: Qwen2VLForConditionalGeneration,
    x: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    penalties: torch.Tensor,
    most: int,
) -> list[list[int]]:
    """Greedy answers of at most ``most`` tokens, without what ends them.

    ``x`` [batch, length, width] are the prompts' embeddings, ``lengths`` [batch] of them real, ``positions`` [3, batch,
    length]; ``penalties`` [batch, 2] are taken off a token's logit: once, and for each time that it was answered.
    """
    batch, device = len(x), x.device
    cache = Cache([], lengths.clone())
    hidden = text_states(model, x, positions, cache)
    cache.layers = [tuple(F.pad(t, (0, 0, 0, most)) for t in layer) for layer in cache.layers]  # type: ignore[misc]
    samples = torch.arange(batch, device=device)
    last = hidden[samples, lengths - 1]
    place = positions.amax(0)[samples, lengths - 1]
    counts = torch.zeros(batch, model.config.text_config.vocab_size, device=device)
    answers, done = [], torch.zeros(batch, dtype=torch.bool, device=device)
    for step in range(most):
        logits = model.lm_head(last).float()
        logits -= penalties[:, :1] * (counts > 0) + penalties[:, 1:] * counts
        chosen = logits.argmax(-1)
        answers.append(chosen)
        done |= chosen == IM_END
        if step % 16 == 15 and bool(done.all()):
            break
        counts[samples, chosen] += 1
        place = place + 1
        x = model.model.language_model.embed_tokens(chosen)[:, None]
        last = text_states(model, x, place.expand(3, 1, -1).transpose(1, 2), cache)[:, 0]
        cache.used += 1
    return [_ended(row) for row in torch.stack(answers, 1).tolist()]


def _ended(ids: Sequence[int]) -> list[int]:
    return list(ids[: ids.index(IM_END)] if IM_END in ids else ids)
