"""Small folders of Qwen2-VL and Qwen2.5-VL, their template as published, and what transformers makes of chats."""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from checkpoints import StillQwen2VL
from models import checkpoint_folders as folders
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

# As the model's authors describe theirs (no published file was read): it numbers pictures where it is asked to.
TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS = [
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|object_ref_start|>"),
    *("<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
]
TEXT = dict(
    vocab_size=432,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    eos_token_id=2,
)
GROUP = 28 * 28  # pixels that become a token
LEAST, MOST = 4 * GROUP, 40 * GROUP
ROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}


class StillQwen2_5VL(Qwen2_5_VLProcessor):
    get_attributes = StillQwen2VL.get_attributes


@dataclass(frozen=True, eq=False)
class Kind:
    """A relative: transformers' classes, a tiny tower, and what that calls the width of its rows."""

    layout: str
    config: type[Any]
    model: type[Any]
    processor: type[Any]
    vision: Mapping[str, Any]
    rows: str

    @property
    def architecture(self) -> str:
        return self.model.__name__

    def __str__(self) -> str:
        return self.layout


QWEN2_VL = Kind(
    "qwen2_vl",
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    StillQwen2VL,
    dict(depth=1, embed_dim=32, num_heads=2, mlp_ratio=2),
    "hidden_size",
)
# Inner rows that are no multiple of 16, and a layer of either attention.
QWEN2_5_VL = Kind(
    "qwen2_5_vl",
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    StillQwen2_5VL,
    dict(depth=2, hidden_size=32, num_heads=2, intermediate_size=44, fullatt_block_indexes=[1]),
    "out_hidden_size",
)


def write_folder(folder: Path, kind: Kind = QWEN2_VL, **processor: Any) -> Path:
    """Without weights; ``processor``: what preprocessor_config.json states beside the class."""
    tokenizer = folders.byte_level(folders.QWEN2_WORDS, TOKENS)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    folders.write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>", "tokenizer_class": "Qwen2Tokenizer"})
    folders.write(
        folder,
        "preprocessor_config.json",
        {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2} | processor,
    )
    config = {
        "architectures": [kind.architecture],
        "model_type": kind.layout,
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "text_config": {**TEXT, "model_type": f"{kind.layout}_text", "rope_theta": 1e6, "rope_scaling": ROPE},
        "vision_config": {
            **kind.vision,
            kind.rows: TEXT["hidden_size"],
            "in_chans": 3,
            "spatial_patch_size": 14,
            "model_type": kind.layout,
        },
    }
    folders.write(folder, "config.json", config)
    return folder


def edit(folder: Path, **changes: Any) -> Path:
    """Changes keys of config.json; of one of its sections where a value is an object. None takes a key away."""
    raw = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        if isinstance(value, dict):
            raw[name] = {key: item for key, item in (raw.get(name, {}) | value).items() if item is not None}
        else:
            raw[name] = value
    folders.write(folder, "config.json", raw)
    return folder


def as_saved_by_4_52(folder: Path) -> Path:
    """Weights by the names of transformers 4.52; of transformers 5 they have those of published files."""
    tensors = load_file(folder / "model.safetensors")
    begins = {"model.": "model.language_model.", "visual.": "model.visual.", "lm_head.": "lm_head."}
    renamed = {
        begins[begin] + name.removeprefix(begin): tensor
        for name, tensor in tensors.items()
        for begin in begins
        if name.startswith(begin)
    }
    assert len(renamed) == len(tensors)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def flatten(folder: Path) -> Path:
    """The text model's settings into config.json itself, as published files have them."""
    raw = json.loads((folder / "config.json").read_text())
    folders.write(folder, "config.json", {**raw.pop("text_config"), **raw})
    return folder


def model_config(text: Mapping[str, Any] = MappingProxyType({}), kind: Kind = QWEN2_VL, **changes: Any) -> Any:
    sizes = {**TEXT, **text}
    half = sizes["hidden_size"] // sizes["num_attention_heads"] // 2
    sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    vision = {**kind.vision, kind.rows: sizes["hidden_size"]}
    return kind.config(text_config={**sizes, "rope_parameters": rope}, vision_config=vision, **changes)


def write_model(
    folder: Path,
    text: Mapping[str, Any] = MappingProxyType({}),
    tied: bool = False,
    kind: Kind = QWEN2_VL,
    **processor: Any,
) -> Any:
    """A folder with random weights, as transformers saves it, and the model; ``text``: what differs from TEXT."""
    raw = json.loads((write_folder(folder, kind, **processor) / "config.json").read_text())
    model = kind.model(model_config(text, kind, tie_word_embeddings=tied, image_token_id=raw["image_token_id"])).eval()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name or "ln_q" in name else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder)
    return model


def picture(width: int, height: int, seed: int) -> tuple[bytes, Image.Image]:
    """Noise over a ramp, as a PNG and as Pillow's."""
    ramp = np.linspace(0, 200, width)[None, :, None] * np.linspace(1, 0.2, height)[:, None, None] * [1.0, 0.8, 0.5]
    noise = np.random.default_rng(seed).normal(20, 15, (height, width, 3))
    image, stream = Image.fromarray(np.clip(ramp + noise, 0, 255).astype(np.uint8)), io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue(), image


def reference_processor(folder: Path, min_pixels: int, max_pixels: int, kind: Kind = QWEN2_VL) -> Any:
    """transformers' own, with its Pillow image processor."""
    size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return kind.processor(Qwen2VLImageProcessorPil(size=size), tokenizer, None, chat_template=TEMPLATE)
