"""The two checkpoints that come with Tessera, as transformers has them.

A checkpoint's folder is the one place that states its model's shape, tokenizer, chat template and processor: training
writes other weights beside copies of its files.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GotOcr2ImageProcessorPil,
    InternVLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

ROOMS, DOCUMENTS = (Path(__file__).parent / model / "checkpoint" for model in ("default_model", "document_model"))
PAD, IM_END = 0, 2  # of either tokenizer


def fresh_model(like: Path, seed: int = 0) -> Any:
    """A float32 model of a checkpoint's shape, with weights drawn from ``seed``."""
    torch.manual_seed(seed)
    return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(like), dtype=torch.float32)


def save_model(folder: Path, like: Path, weights: dict[str, torch.Tensor]) -> None:
    """A whole checkpoint; ``weights`` (a state dict) are rounded to bfloat16."""
    model = fresh_model(like)
    model.load_state_dict(weights)
    model.bfloat16().save_pretrained(folder)
    for file in like.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    (folder / "model.safetensors").chmod(0o644)  # transformers leaves it to its owner alone


class _Still:
    """Without the video half, which refuses to start without torchvision; pictures go transformers' own Pillow path."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


class StillInternVL(_Still, InternVLProcessor): ...


class StillQwen2VL(_Still, Qwen2VLProcessor): ...


def load_processor(folder: Path) -> StillInternVL | StillQwen2VL:
    """transformers' own processor of a checkpoint of either kind, on machines with and without torchvision."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")  # as answers want it
    template = (folder / "chat_template.jinja").read_text()
    file = folder / "processor_config.json"
    if not file.is_file():
        return StillQwen2VL(Qwen2VLImageProcessorPil.from_pretrained(folder), tokenizer, None, chat_template=template)
    settings = json.loads(file.read_text())
    pictures, count = GotOcr2ImageProcessorPil(**settings["image_processor"]), settings["image_seq_length"]
    return StillInternVL(pictures, tokenizer, None, image_seq_length=count, chat_template=template)
