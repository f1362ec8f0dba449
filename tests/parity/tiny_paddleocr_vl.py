"""Small folders of PaddleOCR-VL, their template as its users quote it, and what transformers makes of chats."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from models import checkpoint_folders as folders
from safetensors.torch import load_file, save_file
from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

# No published file was read. Pictures come before the texts of a turn; content that is a plain text is passed over.
TEMPLATE = (
    '{%- if not cls_token is defined -%}{%- set cls_token = "<|begin_of_sentence|>" -%}{%- endif -%}'
    '{%- if not eos_token is defined -%}{%- set eos_token = "</s>" -%}{%- endif -%}'
    '{{- cls_token -}}{%- for message in messages -%}{%- if message["role"] == "user" -%}{{- "User: " -}}'
    '{%- for content in message["content"] -%}{%- if content["type"] == "image" -%}'
    '{{ "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>" }}{%- endif -%}{%- endfor -%}'
    '{%- for content in message["content"] -%}{%- if content["type"] == "text" -%}{{ content["text"] }}'
    '{%- endif -%}{%- endfor -%}{{ "\\n" -}}{%- elif message["role"] == "assistant" -%}{{- "Assistant:\\n" -}}'
    '{%- for content in message["content"] -%}{%- if content["type"] == "text" -%}{{ content["text"] }}'
    '{%- endif -%}{%- endfor -%}{{ eos_token -}}{%- elif message["role"] == "system" -%}'
    '{%- for content in message["content"] -%}{%- if content["type"] == "text" -%}{{ content["text"] + "\\n" }}'
    '{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- "Assistant:\\n" -}}'
    "{%- endif -%}"
)
IMAGE = "<|IMAGE_PLACEHOLDER|>"
TOKENS = ["</s>", "<|begin_of_sentence|>", "<|end_of_sentence|>", IMAGE, "<|IMAGE_START|>", "<|IMAGE_END|>"]
SIDE = 14
GROUP = (2 * SIDE) ** 2  # pixels that become a token
LEAST, MOST = 4 * GROUP, 40 * GROUP
VISION = dict(
    hidden_size=48,  # heads of 24, which the kernels take as 32
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=5 * SIDE,
    layer_norm_eps=1e-2,  # large enough to tell
    patch_size=SIDE,
    spatial_merge_size=2,
)
TEXT = dict(
    vocab_size=432,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)
ROPE = {"rope_type": "default", "rope_theta": 500000.0}


def write_folder(folder: Path, **processor: Any) -> Path:
    """Without config.json and weights; ``processor``: what preprocessor_config.json states beside the class."""
    folder.mkdir(parents=True, exist_ok=True)
    folders.byte_level(folders.QWEN2_WORDS, TOKENS).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    names = {"cls_token": "<|begin_of_sentence|>", "eos_token": "</s>", "image_token": IMAGE}
    folders.write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    stated = {"image_processor_type": "PaddleOCRVLImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    folders.write(folder, "preprocessor_config.json", stated | processor)
    return folder


def token_id(folder: Path, token: str) -> int:
    found = PreTrainedTokenizerFast.from_pretrained(folder).convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def model_config(
    folder: Path, tied: bool = False, bias: bool = False, text: Mapping[str, Any] = MappingProxyType({})
) -> PaddleOCRVLConfig:
    sizes = {**TEXT, **text}
    rope = ROPE | {"mrope_section": [sizes["head_dim"] // 8, *[3 * sizes["head_dim"] // 16] * 2]}
    text = {**sizes, "rope_parameters": rope, "use_bias": bias, "eos_token_id": token_id(folder, "</s>")}
    return PaddleOCRVLConfig(
        text_config=text | {"tie_word_embeddings": tied},
        vision_config=VISION,
        image_token_id=token_id(folder, IMAGE),
        tie_word_embeddings=tied,
        architectures=["PaddleOCRVLForConditionalGeneration"],
    )


def as_trained(model: Any) -> Any:
    """transformers' model with the positions of the authors' code, which transformers 5.17 interpolates another way."""
    embeddings = model.visual.vision_model.embeddings
    assert embeddings.interpolation_align_corners is True
    embeddings.interpolation_align_corners = False
    return model


def write_model(
    folder: Path,
    tied: bool = False,
    bias: bool = False,
    text: Mapping[str, Any] = MappingProxyType({}),
    **processor: Any,
) -> Any:
    """A folder with random weights, as transformers saves it, and the model; ``text``: what differs from TEXT."""
    config = model_config(write_folder(folder, **processor), tied, bias, text)
    model = PaddleOCRVLForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder)
    as_trained(model.model)
    return model


def as_published(folder: Path) -> Path:
    """The text model's settings in config.json itself, with what else stands there, and the weights that only training
    and SigLIP had."""
    raw = json.loads((folder / "config.json").read_text())
    text = raw.pop("text_config")
    more = {"compression_ratio": 1.0, "ignored_index": -100, "rope_is_neox_style": True, "use_3d_rope": True}
    more |= {"weight_share_add_bias": True, "use_flash_attention": False, "max_sequence_length": None}
    rope = text.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    scaling = {"rope_scaling": rope | {"type": "default"}, "rope_theta": theta}
    raw["vision_config"] |= {"temporal_patch_size": 2, "tokens_per_second": 2, "model_type": "paddleocr_vl"}
    folders.write(folder, "config.json", {**text, **raw, **more, **scaling, "model_type": "paddleocr_vl"})
    tensors, tower = load_file(folder / "model.safetensors"), "visual.vision_model."
    tensors[f"{tower}embeddings.packing_position_embedding.weight"] = torch.zeros(4, VISION["hidden_size"])
    for name in ("probe", "attention.in_proj_weight", "attention.out_proj.bias", "layernorm.weight", "mlp.fc1.bias"):
        tensors[f"{tower}head.{name}"] = torch.zeros(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def as_saved_by_5(folder: Path) -> Path:
    """Weights by the names of transformers' own modules, which its saver gives back their published ones."""
    begins = {"visual.": "model.visual.", "mlp_AR.": "model.projector.", "model.": "model.language_model."}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        begin = next((begin for begin in begins if name.startswith(begin)), "")
        tensors[begins.get(begin, "") + name.removeprefix(begin)] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reference_processor(folder: Path, least: int, most: int) -> PaddleOCRVLProcessor:
    """transformers' own, with its Pillow image processor."""
    pictures = json.loads((folder / "preprocessor_config.json").read_text())
    size = {"shortest_edge": least, "longest_edge": most}
    processor = PaddleOCRVLImageProcessorPil(
        size=size, image_mean=pictures["image_mean"], image_std=pictures["image_std"]
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return PaddleOCRVLProcessor(processor, tokenizer, chat_template=TEMPLATE)
