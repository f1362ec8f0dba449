"""Folders with a tiny tower of Qwen2-VL or Qwen2.5-VL alone, pictures for it, and what transformers makes of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_qwen2_vl import QWEN2_5_VL, QWEN2_VL, Kind
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.normalization import CLIP_MEAN, CLIP_STD
from tessera.models.registry import read_config

PATCH = 14
ROPE = {"rope_type": "default", "mrope_section": [4, 4, 4]}
TINY = {  # heads of 80
    QWEN2_VL: dict(depth=2, embed_dim=160, num_heads=2, hidden_size=48, mlp_ratio=2, patch_size=PATCH),
    QWEN2_5_VL: dict(
        depth=3,
        hidden_size=160,
        num_heads=2,
        out_hidden_size=48,
        intermediate_size=300,
        patch_size=PATCH,
        fullatt_block_indexes=[1],
    ),
}
TOWERS = {QWEN2_VL: Qwen2VisionTransformerPretrainedModel, QWEN2_5_VL: Qwen2_5_VisionTransformerPretrainedModel}


def model_of(seed: int = 0, kind: Kind = QWEN2_VL, **sizes: Any) -> torch.nn.Module:
    vision = kind.config.sub_configs["vision_config"](**TINY[kind] | sizes)
    model = TOWERS[kind](vision).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name or "ln_q" in name else 0.0, 0.1, generator=generator)
    return model


def config_of(folder: Path, kind: Kind = QWEN2_VL, **sizes: Any) -> CheckpointConfig:
    text = dict(hidden_size=48, num_attention_heads=2, num_key_value_heads=1, rope_parameters=ROPE)
    config = kind.config(vision_config=TINY[kind] | sizes, text_config=text, architectures=[kind.architecture])
    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"patch_size": config.vision_config.patch_size}))
    return read_config(folder)


def save(model: torch.nn.Module, folder: Path, prefix: str = "model.visual.", **more: torch.Tensor) -> None:
    stored = {prefix + name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(stored | {prefix + name: tensor for name, tensor in more.items()}, folder / "model.safetensors")


def picture(grid: tuple[int, int], seed: int = 0, side: int = PATCH) -> np.ndarray:
    """uint8 [rows, columns, 3]: a ramp with noise."""
    rows, columns = (count * side for count in grid)
    ramp = np.linspace(0, 255, columns)[None, :, None] * [1.0, 0.5, 0.2] * np.linspace(1, 0.3, rows)[:, None, None]
    return np.clip(ramp + np.random.default_rng(seed).normal(0, 40, (rows, columns, 3)), 0, 255).astype(np.uint8)


def groups(pixels: np.ndarray, side: int = PATCH) -> torch.Tensor:
    """As the family cuts them: uint8 [rows, 2, 2, side, side, 3]."""
    rows, columns = (size // side // 2 for size in pixels.shape[:2])
    blocks = pixels.reshape(rows, 2, side, columns, 2, side, 3).transpose(0, 3, 1, 4, 2, 5, 6)
    return torch.from_numpy(blocks.reshape(-1, 2, 2, side, side, 3).copy())


def values(pixels: np.ndarray, side: int = PATCH) -> torch.Tensor:
    """As transformers' image processor gives them: float32 [patches, 3 * 2 * side * side], each frame twice."""
    normed = (pixels.astype(np.float64) / 255 - CLIP_MEAN) / CLIP_STD
    twice = np.stack([normed.transpose(2, 0, 1)] * 2)[None]
    rows, columns = (size // side // 2 for size in pixels.shape[:2])
    blocks = twice.reshape(1, 2, 3, rows, 2, side, columns, 2, side).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return torch.from_numpy(blocks.reshape(4 * rows * columns, -1)).float()


def wires(grids: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    return [(1, *grid) for grid in grids]


@torch.inference_mode()
def expected(model: torch.nn.Module, pixels: list[np.ndarray], side: int = PATCH) -> torch.Tensor:
    grids = torch.tensor([(1, p.shape[0] // side, p.shape[1] // side) for p in pixels])
    return model(torch.cat([values(p, side) for p in pixels]), grid_thw=grids).pooler_output
