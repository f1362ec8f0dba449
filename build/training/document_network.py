"""The forward passes of the transformers model for padded batches.

The tower's is written out, because training wants grey pictures side by side and transformers takes them one behind the
other; a test holds it equal to transformers' own.
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
from document_samples import BEGINS, ENDS, LAYOUT_SIDE, NUMBER, PATCH
from torch import nn
from transformers import Qwen2VLForConditionalGeneration

IMAGE_MEAN, IMAGE_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """x [batch, heads, length, size] with its pairs (i, i + size / 2) turned; ``turns``: see :func:`_turns`."""
    cos, sin = turns.to(x.dtype)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _turns(angles: torch.Tensor) -> torch.Tensor:
    """Angles [batch, length, pairs] -> their cosine and sine [2, batch, 1, length, pairs]."""
    return torch.stack((angles.cos(), angles.sin()))[:, :, None]


@cache
def _levels(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation [3, 1]; kept, because a copy to the device would wait for all that is queued there."""
    return torch.tensor(IMAGE_MEAN, device=device)[:, None], torch.tensor(IMAGE_STD, device=device)[:, None]


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
    mean, std = _levels(patches.device)
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


def _head_size(model: Qwen2VLForConditionalGeneration) -> int:
    config = model.config.text_config
    return config.hidden_size // config.num_attention_heads


def _text_turns(model: Qwen2VLForConditionalGeneration, positions: torch.Tensor) -> torch.Tensor:
    size, told = _head_size(model), model.config.text_config.rope_parameters
    angles = positions[..., None] * told["rope_theta"] ** -(torch.arange(0, size, 2, device=positions.device) / size)
    parts = angles.split(told["mrope_section"], dim=-1)
    return _turns(torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1))


def text_states(
    model: Qwen2VLForConditionalGeneration, x: torch.Tensor, positions: torch.Tensor, entering: list[torch.Tensor]
) -> torch.Tensor:
    """Embeddings [batch, length, width] at ``positions`` [3, batch, length] to last hidden states; ``entering`` gets
    the states that enter each layer."""
    out = model.model.language_model(
        inputs_embeds=x,
        attention_mask={"full_attention": None},
        position_ids=positions,
        use_cache=False,
        output_hidden_states=True,
    )
    entering += out.hidden_states[:-1]
    return out.last_hidden_state


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


def looks(
    model: Qwen2VLForConditionalGeneration, layer: int, entering: torch.Tensor, positions: torch.Tensor, first: int
) -> torch.Tensor:
    """How much the first head of a layer looks from each place of ``first`` and on at each place: logarithms of shares
    float32 [batch, length - first, length]. ``entering`` [batch, length, width]: the states that enter the layer."""
    body, size, turns = model.model.language_model.layers[layer], _head_size(model), _text_turns(model, positions)
    normed, attention = body.input_layernorm(entering), body.self_attn
    query = F.linear(normed[:, first:], attention.q_proj.weight[:size], attention.q_proj.bias[:size])
    query = _turned(query[:, None], turns[..., first:, :])[:, 0]
    key = _turned(attention.k_proj(normed)[:, None], turns)[:, 0]
    scores = (query @ key.mT).float() / size**0.5
    length = entering.shape[1]
    later = torch.ones(length - first, length, dtype=torch.bool, device=scores.device).triu(first + 1)
    return scores.masked_fill(later, -math.inf).log_softmax(-1)


LOOKING = (2, 3)
"""The text body's layers whose first head looks for what to answer next, as it does in reading. What a row is found by
and what is found there must be in the states that enter the first of them."""
BOX_WEIGHT = 10.0
"""Of distances in parts of a page, which count in hundredths."""
ROW_WEIGHT = 4.0
"""A row stands for four patches."""
SIDE = 0.05
"""Parts of a page that a unit of the head's answer is: a step of AdamW at its full rate moves that by tenths."""
DIGITS = 12
NONE = -100  # cross_entropy's mark of what does not count


def looking_loss(
    model: Qwen2VLForConditionalGeneration, entering: list[torch.Tensor], held: dict[str, torch.Tensor], head: int
) -> torch.Tensor:
    """How little is looked at the rows of the block that is being answered, summed over the answers' tokens.

    ``held`` are a chunk's arrays, of layouts; ``entering`` the states that enter each layer; ``head`` tokens stand
    before the rows.
    """
    numbers = row_numbers(held["dense"][..., NUMBER])
    rows = numbers.shape[1]
    lines = held["line"][:, head:]  # also from among the rows: an answer begins sooner where some are left out
    there = (numbers[:, None] == lines[..., None, None]).any(-1)
    counted = (lines > 0) & there.any(-1)
    total = torch.zeros((), device=lines.device)
    for layer in LOOKING:
        shares = looks(model, layer, entering[layer], held["positions"], head)
        shares = shares[..., head : head + rows].masked_fill(~there, -1e4).logsumexp(-1)
        total = total - torch.where(counted, shares, 0).sum() / len(LOOKING)
    return total


def row_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of blocks by patch [pages, patches] to those in the upper and the lower half of each row
    [pages, patches / 4, 2]: lines can be so thin that a row has two of them."""
    return numbers.unflatten(1, (-1, 2, 2)).amax(-1)


class DenseHead(nn.Module):
    """Reads what training tells the states of patches and rows. Training only; never saved with the model.

    What was answered last is how the text body finds its place in a picture, so that each place is told what is to be
    answered there and what comes before it. A patch of a crop: the character whose middle it holds and the two before.
    A patch of a page: kind, corners, and how far off the sides are of the block that covers it and of the one before
    it. A row of a page: kinds and boxes of these two as the answer spells them, for its upper and for its lower half.
    """

    def __init__(self, width: int, text_width: int, characters: int, kinds: int) -> None:
        super().__init__()
        self.character = nn.Linear(width, 3 * characters)
        self.patch = nn.Linear(width, kinds + 1 + 2 + 2 * 4)
        self.parts = [kinds + 1, 10 * DIGITS, 4]
        self.row = nn.Linear(text_width, 2 * 2 * sum(self.parts))
        for layer in (self.character, self.patch, self.row):  # a fresh head must not mislead a trained model
            nn.init.zeros_(layer.weight)
        self.register_buffer("rare", torch.tensor(10.0), persistent=False)  # a page has few corners

    def layout_loss(self, states: torch.Tensor, rows: torch.Tensor, held: dict[str, torch.Tensor]) -> torch.Tensor:
        """Summed over patches: the tower's last states [pages, patches, width], the text body's states of the rows
        [pages, patches / 4, text width], a chunk's arrays."""
        goal, blocks = held["dense"], held["blocks"]
        real = torch.arange(goal.shape[1], device=goal.device) < held["lengths"][:, None]
        own, before = _blocks_of(blocks, goal[..., NUMBER])
        said = self.patch(states).float()
        kinds, corners, sides = said.split((said.shape[-1] - 10, 2, 8), dim=-1)
        covers = F.cross_entropy(
            kinds.flatten(0, 1), torch.where(real, own[..., 0], NONE).flatten(), ignore_index=NONE, reduction="sum"
        )
        ends = F.binary_cross_entropy_with_logits(
            corners, goal[..., [BEGINS, ENDS]].float(), real[..., None].float(), reduction="sum", pos_weight=self.rare
        )
        middles = (held["places"].flip(-1) + 0.5) / (LAYOUT_SIDE // PATCH)
        sides = SIDE * sides.unflatten(-1, (2, 4)) + middles.repeat(1, 1, 2)[:, :, None]
        near = _distance(sides, torch.stack((own, before), 2))

        both = torch.stack(_blocks_of(blocks, row_numbers(goal[..., NUMBER])), -2)
        kinds, digits, sides = self.row(rows).float().unflatten(-1, (2, 2, -1)).split(self.parts, dim=-1)
        kind, box = both[..., 0], both[..., 1:]
        # That there is no block counts, and that there is none before one; not what is before none.
        first = torch.where(real[:, ::4, None], kind[..., 0], NONE)
        told = torch.stack((first, torch.where(kind[..., 0] > 0, kind[..., 1], NONE)), -1)
        named = F.cross_entropy(kinds.flatten(0, -2), told.flatten(), ignore_index=NONE, reduction="sum")
        spelt = torch.stack((box // 100, box // 10 % 10, box % 10), -1)
        spelt = torch.where(kind[..., None, None] > 0, spelt, NONE).flatten()
        spelling = F.cross_entropy(digits.reshape(-1, 10), spelt, ignore_index=NONE, reduction="sum") / DIGITS
        far = _distance(SIDE * sides, both)
        return covers + ends + BOX_WEIGHT * near + ROW_WEIGHT / 2 * (named + spelling + BOX_WEIGHT * far)


def _blocks_of(blocks: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Kind and box int64 [pages, ..., 5] of the blocks with these ``numbers`` [pages, ...], and of those before them,
    out of ``blocks`` [pages, blocks + 1, 5]."""
    pages = torch.arange(len(blocks), device=blocks.device).view(-1, *[1] * (numbers.ndim - 1))
    numbers = numbers.long()
    return blocks[pages, numbers].long(), blocks[pages, (numbers - 1).clamp(0)].long()


def _distance(sides: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Between sides [..., 4] in parts of a page and those of ``blocks`` [..., 5], where there is one, summed."""
    return ((sides - blocks[..., 1:] / 1000).abs() * (blocks[..., :1] > 0)).sum()
