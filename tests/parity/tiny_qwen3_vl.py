"""Small folders of Qwen3-VL, with a template as the published one's, and what transformers makes of chats."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from models import checkpoint_folders as folders
from tiny_qwen2_vl import TOKENS
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

# Built as the published one is said to be (which was not read): no system turn of its own, parts by their attributes.
TEMPLATE = """
{%- macro parts(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' or 'video' in part %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}{{ parts(message.content) }}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
#: heads of 24, which are filled up to 32, and a grid that pictures enlarge and shrink
VISION = dict(
    depth=4,
    hidden_size=48,
    num_heads=2,
    intermediate_size=80,
    out_hidden_size=64,
    num_position_embeddings=36,
    deepstack_visual_indexes=[0, 2],
)
TEXT = dict(
    vocab_size=432,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    max_position_embeddings=4096,
    eos_token_id=2,
)
#: what a text model with experts has beside TEXT; of its tensors of all experts none is square
EXPERTS = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=96, mlp_only_layers=[1])
ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [5, 4, 3], "mrope_interleaved": True}
SIDE = 16
HALVES = [0.5, 0.5, 0.5]  # mean and deviation of its pixels


class StillQwen3VL(Qwen3VLProcessor):
    """Without the video half, which refuses to start without torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


def write_folder(folder: Path, **processor: Any) -> Path:
    """Without weights, the text model's rope as published files state it; ``processor``: what
    preprocessor_config.json states beside the class, patches and normalisation."""
    tokenizer = folders.byte_level(folders.QWEN2_WORDS, TOKENS)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    folders.write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>", "tokenizer_class": "Qwen2Tokenizer"})
    stated = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": SIDE, "merge_size": 2}
    normal = {"image_mean": HALVES, "image_std": HALVES}
    folders.write(folder, "preprocessor_config.json", stated | normal | processor)
    rope = {name: value for name, value in ROPE.items() if name != "rope_theta"}
    text = {**TEXT, "model_type": "qwen3_vl_text", "rope_theta": 5e6, "rope_scaling": rope}
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "text_config": text,
        "vision_config": {**VISION, "in_channels": 3, "patch_size": SIDE, "model_type": "qwen3_vl"},
    }
    folders.write(folder, "config.json", config)
    return folder


def model_config(
    text: Mapping[str, Any] = MappingProxyType({}), vision: Mapping[str, Any] = MappingProxyType({}), **changes: Any
) -> Qwen3VLConfig | Qwen3VLMoeConfig:
    sizes = {**TEXT, **text}
    half = sizes["head_dim"] // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3] if "head_dim" in text else ROPE["mrope_section"]
    tower = {**VISION, "out_hidden_size": sizes["hidden_size"], **vision}
    return (Qwen3VLMoeConfig if "num_experts" in text else Qwen3VLConfig)(
        text_config={**sizes, "rope_parameters": {**ROPE, "mrope_section": sections}}, vision_config=tower, **changes
    )


def write_model(
    folder: Path,
    text: Mapping[str, Any] = MappingProxyType({}),
    vision: Mapping[str, Any] = MappingProxyType({}),
    tied: bool = False,
    **processor: Any,
) -> Any:
    """A folder with random weights, as transformers saves it, and the model; ``text`` and ``vision``: what differs from
    TEXT and VISION."""
    raw = json.loads((write_folder(folder, **processor) / "config.json").read_text())
    config = model_config(text, vision, tie_word_embeddings=tied, image_token_id=raw["image_token_id"])
    kind = Qwen3VLMoeForConditionalGeneration if "num_experts" in text else Qwen3VLForConditionalGeneration
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder)
    return model


def reference_processor(folder: Path, min_pixels: int, max_pixels: int) -> StillQwen3VL:
    """transformers' own, with its Pillow image processor."""
    size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    pictures = Qwen2VLImageProcessorPil(size=size, patch_size=SIDE, image_mean=HALVES, image_std=HALVES)
    return StillQwen3VL(pictures, tokenizer, None, chat_template=TEMPLATE)
