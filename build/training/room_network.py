"""Forward passes of the transformers model in two halves, for what training does between them: the dense supervision
reads the states of patches, and a picture's rows are shared by branches of questions."""

import torch
import torch.nn.functional as F
from augment import GRID
from sequences import attention_mask
from torch import nn
from transformers import InternVLForConditionalGeneration

IMAGE_MEAN, IMAGE_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def patch_states(
    model: InternVLForConditionalGeneration, tiles: torch.Tensor, gain: torch.Tensor | None = None
) -> torch.Tensor:
    """uint8 [n,3,448,448] to the ViT's last states without CLS, [n, 256, hidden].

    `gain` [n,2,3] recolours for training: factors and offsets, in grey levels.
    """
    tower = model.model.vision_tower
    mean, std = (torch.tensor(v, device=tiles.device).view(1, 3, 1, 1) for v in (IMAGE_MEAN, IMAGE_STD))
    levels = tiles.float()
    if gain is not None:
        levels = (levels * gain[:, 0, :, None, None] + gain[:, 1, :, None, None]).clamp(0, 255)
    pixels = (levels / 255 - mean) / std
    return tower(pixels).last_hidden_state[:, 1:]


def image_rows(model: InternVLForConditionalGeneration, states: torch.Tensor) -> torch.Tensor:
    """Patch states [n, 256, hidden] to language-model rows [n, 64, text hidden]."""
    grid = states.unflatten(1, (GRID, GRID))
    shuffled = model.model.pixel_shuffle(grid, scale_factor=model.config.downsample_ratio)
    return model.model.multi_modal_projector(shuffled.flatten(1, 2))


def text_states(
    model: InternVLForConditionalGeneration,
    prefix: torch.Tensor,
    rows: torch.Tensor,
    branch_ids: torch.Tensor,
    branch_number: torch.Tensor,
    branch_position: torch.Tensor,
    rows_at: int,
) -> torch.Tensor:
    """Last hidden states [pictures, length, hidden] of the branches, given image rows [pictures, 64*tiles, hidden].

    `prefix` int64 [length] are the shared ids with placeholders from place `rows_at` on.
    """
    embed = model.model.language_model.embed_tokens
    pictures = branch_ids.shape[0]
    shared = embed(prefix)[None].expand(pictures, -1, -1)
    after = rows_at + rows.shape[1]
    embeddings = torch.cat([shared[:, :rows_at], rows.to(shared.dtype), shared[:, after:], embed(branch_ids)], dim=1)
    positions = torch.cat(
        [torch.arange(len(prefix), device=rows.device).expand(pictures, -1), branch_position + len(prefix)], dim=1
    )
    out = model.model.language_model(
        inputs_embeds=embeddings,
        attention_mask={"full_attention": attention_mask(len(prefix), branch_number)},
        position_ids=positions,
        use_cache=False,
    )
    return out.last_hidden_state[:, len(prefix) :]


class DenseHead(nn.Module):
    """Reads from each patch state which classes lie there and where object centres are.  Training only; never saved."""

    def __init__(self, hidden: int, classes: int):
        super().__init__()
        self.linear = nn.Linear(hidden, 2 * classes)
        nn.init.constant_(self.linear.bias, -4.0)  # nearly every class is absent from nearly every patch

    def forward(
        self, states: torch.Tensor, covered: torch.Tensor, centred: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """Mean over valid tiles' patches of the summed class losses; covered, centred [n,16,16,classes]; valid [n]."""
        logits = self.linear(states).float()
        targets = torch.cat([covered, centred], dim=-1).flatten(1, 2).float()
        loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="none", pos_weight=logits.new_tensor(4.0))
        per_tile = loss.sum(-1).mean(-1)
        return (per_tile * valid).sum() / valid.sum()
