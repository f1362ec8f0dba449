"""The document model's sizes, and how its folder is written.

Qwen2-VL: patches of 14 pixels, four of them one row of the language model. A page of 200 dots an inch has letters of
about 14 x 14 pixels, so a row holds about two. The bases of the rotations are small because the places are few: with
Qwen2-VL's own, most pairs of a head would hardly turn over a page.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from document_tokens import IM_END, IMAGE_PAD, PAD, VIDEO_PAD, VISION_END, VISION_START, make_tokenizer, save_tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

PATCH, MERGE = 14, 2
GROUP = PATCH * MERGE
LEAST_PIXELS, MOST_PIXELS = 4 * GROUP**2, 2048 * GROUP**2
IMAGE_MEAN, IMAGE_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
MAX_FOLDER_BYTES = 8_000_000


def build_config() -> Qwen2VLConfig:
    text = dict(
        vocab_size=make_tokenizer().get_vocab_size(),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 15, 15]},
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=PAD,
    )
    vision = dict(
        depth=5,
        embed_dim=192,
        num_heads=3,
        mlp_ratio=2,
        hidden_size=text["hidden_size"],
        rope_parameters={"rope_type": "axial", "rope_theta": 100.0},
    )
    return Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        architectures=["Qwen2VLForConditionalGeneration"],
        dtype="bfloat16",
    )


def build_model(seed: int = 0) -> Qwen2VLForConditionalGeneration:
    """A float32 model with fresh weights drawn from ``seed``."""
    torch.manual_seed(seed)
    return Qwen2VLForConditionalGeneration(build_config()).float()


def save_model(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """The whole folder; ``weights`` (a state dict) are rounded to bfloat16."""
    save_tokenizer(folder)
    model = Qwen2VLForConditionalGeneration(build_config())
    model.load_state_dict(weights)
    model.bfloat16()
    model.generation_config = GenerationConfig(eos_token_id=IM_END, pad_token_id=PAD)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # transformers leaves it to its owner alone
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "min_pixels": LEAST_PIXELS,
        "max_pixels": MOST_PIXELS,
        "image_mean": IMAGE_MEAN,
        "image_std": IMAGE_STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


class StillProcessor(Qwen2VLProcessor):
    """transformers' processor without its video half, which wants torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


def load_processor(folder: Path) -> StillProcessor:
    """transformers' own for a folder, with its Pillow image processor."""
    template = (folder / "chat_template.jinja").read_text()
    pictures = Qwen2VLImageProcessorPil.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")  # as answers want it
    return StillProcessor(pictures, tokenizer, None, chat_template=template)
