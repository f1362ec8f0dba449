"""Complete checkpoint folders with tiny random weights, one builder for each supported layout.

:func:`hf_native` writes what transformers' ``InternVLForConditionalGeneration.save_pretrained`` would;
:func:`as_internvl_chat` rewrites such a folder in the original InternVLChatModel layout, so that the two hold the same
model under different names (``text="internlm2"`` needs a Llama body); :func:`as_qianfan` as Qianfan-OCR, whose files
have the names of that layout and the keys of the first.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_tokenizers import IMAGE_TOKEN, byte_level_tokenizer, write_json, write_sentencepiece, write_vocab_and_merges
from tokenizers import Tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] in ['image', 'image_url'] %}<IMG_CONTEXT>\n{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As the authors describe theirs: a system turn always, the pictures' places as text, and no thoughts of past answers.
QIANFAN_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nRead it.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is not string %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- '<image>\\n' }}{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}"
    "{%- elif message['role'] == 'assistant' and '</think>' in message['content'] %}"
    "{{- message['content'].split('</think>')[-1].lstrip('\\n') }}"
    "{%- else %}{{- message['content'] }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Sentencepiece tokenizers: their class, and the tokens of their turns. Phi-3's take the whitespace behind them.
SENTENCEPIECE_CHATS = {
    "internlm2": ("InternLM2Tokenizer", ("<|im_start|>", "<|im_end|>"), {}),
    "phi3": ("LlamaTokenizer", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), {"rstrip": True}),
}
CHAT_NAMES = {"attention_bias": "qkv_bias", "use_qk_norm": "qk_normalization"}
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny model; the defaults load in milliseconds and take 448-pixel tiles as real models do."""

    text: str = "qwen2"  # or another of ARCHITECTURES
    image_size: int = 448
    patch_size: int = 56
    vision_hidden: int = 32
    vision_heads: int = 2
    vision_layers: int = 2
    vision_mlp: int = 48
    norm_type: str = "layer_norm"
    qk_norm: bool = False
    attention_bias: bool = True
    hidden_act: str = "gelu"
    feature_layer: int = -1
    mean_pooling: bool = True
    text_hidden: int = 64
    text_heads: int = 4
    text_kv_heads: int = 2
    head_dim: int = 16
    text_layers: int = 2
    text_mlp: int = 96
    text_bias: bool = False  # Llama's and Qwen3's attention_bias; Qwen2 always has q/k/v biases
    text_mlp_bias: bool = False  # Llama's alone
    tie: bool = False
    #: Qwen3-MoE's own settings, in pairs
    experts: tuple[tuple[str, Any], ...] = (("num_experts", 8), ("num_experts_per_tok", 2), ("norm_topk_prob", True))
    max_position: int = 4096
    rope: tuple[tuple[str, Any], ...] = (("rope_type", "default"), ("rope_theta", 10000.0))

    @property
    def outside_rope(self) -> dict[str, Any]:
        """What Phi-3 states beside its rope."""
        return {name: value for name, value in self.rope if name == "original_max_position_embeddings"}

    @property
    def tokens_per_tile(self) -> int:
        return (self.image_size // self.patch_size // 2) ** 2


def hf_native(
    folder: Path, shape: Shape = Shape(), seed: int = 0, dtype: torch.dtype = torch.float32, prefix: str = ""
) -> Path:
    """Write an HF-native folder. ``prefix`` "" gives the names transformers 5 saves, "model." those of 4.52."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer()
    config = _hf_config(shape, tokenizer, dtype)
    write_json(folder / "config.json", config)
    eos, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    write_json(folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": pad})
    _write_processor(folder, shape, tokenizer)
    generator = torch.Generator().manual_seed(seed)
    sizes = dict(each for weight in _weights(json.dumps(config)).items() for each in _by_expert(*weight))
    filled = {name: _filled(name, size, generator).to(dtype) for name, size in sizes.items()}
    if not prefix:
        filled = {_new_name(name): tensor for name, tensor in filled.items()}
    save_file(filled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def as_internvl_chat(
    source: Path, folder: Path, text: str = "internlm2", template: str | None = None, ps_version: str = "v2"
) -> Path:
    """Rewrite the HF-native folder ``source`` (transformers-5 names) as InternVLChatModel.

    ``text``: "internlm2" (from a Llama body; wqkv packed, sentencepiece tokenizer), or the body that the source has
    (vocab.json and merges.txt; Phi-3: sentencepiece). A sentencepiece vocabulary has its own ids in the source's range.
    """
    folder.mkdir(parents=True, exist_ok=True)
    native = json.loads((source / "config.json").read_text())
    tower, body = native["vision_config"], native["text_config"]
    tensors = load_file(source / "model.safetensors")
    renamed = _chat_vision(tensors)
    if text == "internlm2":
        renamed.update(_internlm2_text(tensors, body))
    else:
        renamed.update({name: value for name, value in tensors.items() if name.startswith("language_model.")})
    if text in SENTENCEPIECE_CHATS:
        write_sentencepiece(folder, body["vocab_size"], *SENTENCEPIECE_CHATS[text])
    else:
        write_vocab_and_merges(folder)
    theta = body["rope_parameters"]["rope_theta"]
    rule = {name: value for name, value in body["rope_parameters"].items() if name != "rope_theta"}
    scaling = None if rule["rope_type"] == "default" else {"type": rule.pop("rope_type"), **rule}
    llm = {name: value for name, value in body.items() if name not in ("rope_parameters", "attention_bias", "dtype")}
    llm |= {
        "architectures": [ARCHITECTURES[text]],
        "model_type": text,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "bias" if text == "internlm2" else "attention_bias": body.get("attention_bias", False),
        "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
    }
    config = {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "model_type": "internvl_chat",
        "downsample_ratio": native["downsample_ratio"],
        "dynamic_image_size": True,
        "force_image_size": tower["image_size"][0],
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 12,
        "use_thumbnail": True,
        "ps_version": ps_version,
        "select_layer": native["vision_feature_layer"],
        "system_message": "You inspect homes.",
        "template": template or {"internlm2": "internlm2-chat", "phi3": "phi3-chat"}.get(text, "internvl2_5"),
        "torch_dtype": native["dtype"],
        "llm_config": llm,
        "vision_config": {
            "architectures": ["InternVisionModel"],
            **{
                CHAT_NAMES.get(name, name): value[0] if isinstance(value, list) else value
                for name, value in tower.items()
            },
            "model_type": "intern_vit_6b",
        },
    }
    write_json(folder / "config.json", config)
    save_file({k: v.contiguous() for k, v in renamed.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def as_qianfan(source: Path, folder: Path, template: str = CHAT_TEMPLATE) -> Path:
    """Rewrite the HF-native folder ``source`` (transformers-5 names, Qwen3) as Qianfan-OCR, with what the class has by
    default left out."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "generation_config.json"):
        shutil.copyfile(source / name, folder / name)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["QianfanOCRForConditionalGeneration"], "model_type": "qianfan_ocr"}
    tower = config["vision_config"] | {"model_type": "qianfan_ocr_vision", "drop_path_rate": 0.1}
    config["vision_config"] = {name: value for name, value in tower.items() if name != "attention_bias"}
    for section, names in ((config, ["tie_word_embeddings"]), (config["text_config"], ["model_type", "architectures"])):
        for name in names:
            del section[name]
    write_json(folder / "config.json", config)
    tensors = load_file(source / "model.safetensors")
    renamed = _chat_vision(tensors)
    renamed |= {name: value for name, value in tensors.items() if name.startswith("language_model.")}
    save_file({k: v.contiguous() for k, v in renamed.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def qianfan_processor(folder: Path) -> Any:
    """transformers' own of such a folder, of Pillow's pictures."""
    from transformers import AutoTokenizer, GotOcr2ImageProcessorPil, QianfanOCRProcessor

    settings = json.loads((folder / "processor_config.json").read_text())
    pictures, count = GotOcr2ImageProcessorPil(**settings["image_processor"]), settings["image_seq_length"]
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return QianfanOCRProcessor(pictures, AutoTokenizer.from_pretrained(folder), count, chat_template=template)


def _hf_config(shape: Shape, tokenizer: Tokenizer, dtype: torch.dtype) -> dict[str, Any]:
    text: dict[str, Any] = {
        "architectures": [ARCHITECTURES[shape.text]],
        "model_type": shape.text,
        "hidden_size": shape.text_hidden,
        "intermediate_size": shape.text_mlp,
        "num_hidden_layers": shape.text_layers,
        "num_attention_heads": shape.text_heads,
        "num_key_value_heads": shape.text_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": shape.max_position,
        "rope_parameters": dict(shape.rope),
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "tie_word_embeddings": shape.tie,
    }
    text |= {
        "qwen2": {"use_sliding_window": False, "sliding_window": None},
        "qwen3": {"attention_bias": shape.text_bias, "use_sliding_window": False, "sliding_window": None},
        "qwen3_moe": {
            "attention_bias": shape.text_bias,
            "use_sliding_window": False,
            "sliding_window": None,
            "moe_intermediate_size": shape.text_mlp // 2,
            **dict(shape.experts),
        },
        "llama": {"attention_bias": shape.text_bias, "mlp_bias": shape.text_mlp_bias},
        "phi3": {"sliding_window": 2 * shape.max_position, **shape.outside_rope},
    }[shape.text]
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "downsample_ratio": 0.5,
        "dtype": str(dtype).removeprefix("torch."),
        "image_seq_length": shape.tokens_per_tile,
        "image_token_id": tokenizer.token_to_id(IMAGE_TOKEN),
        "projector_hidden_act": "gelu",
        "vision_feature_layer": shape.feature_layer,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": shape.tie,
        "text_config": text,
        "vision_config": {
            "model_type": "internvl_vision",
            "hidden_size": shape.vision_hidden,
            "intermediate_size": shape.vision_mlp,
            "num_hidden_layers": shape.vision_layers,
            "num_attention_heads": shape.vision_heads,
            "image_size": [shape.image_size] * 2,
            "patch_size": [shape.patch_size] * 2,
            "hidden_act": shape.hidden_act,
            "norm_type": shape.norm_type,
            "layer_norm_eps": 1e-6,
            "attention_bias": shape.attention_bias,
            "use_qk_norm": shape.qk_norm,
            "use_mean_pooling": shape.mean_pooling,
            "use_absolute_position_embeddings": True,
            "layer_scale_init_value": 0.1,
        },
    }


@cache
def _weights(config: str) -> dict[str, torch.Size]:
    """Names as transformers 4.52 saved them, and sizes, of its own model of a config.json."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    with torch.device("meta"):
        model = InternVLForConditionalGeneration(InternVLConfig.from_dict(json.loads(config)))
    tied = set(model.all_tied_weights_keys)
    return {name: weight.shape for name, weight in sorted(model.state_dict().items()) if name not in tied}


def _by_expert(name: str, size: torch.Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A weight as it is stored: that of all experts as theirs."""
    before, experts, part = name.partition(".experts.")
    if not experts:
        yield name, size
        return
    parts = ["down_proj"] if part == "down_proj" else ["gate_proj", "up_proj"]
    for number in range(size[0]):
        for each in parts:
            yield f"{before}.experts.{number}.{each}.weight", (size[1] // len(parts), size[2])


def split_experts(folder: Path) -> None:
    """Stores each expert's matrices by themselves, of experts in one tensor either way round."""
    path = folder / "model.safetensors"
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(path)
    hidden = config.get("text_config", config)["hidden_size"]
    for name in [name for name in tensors if re.search(r"experts\.(gate_up|down)_proj$", name)]:
        experts, _, part = name.rpartition(".")
        whole, inputs = tensors.pop(name), part == "gate_up_proj"
        whole = whole if whole.shape[1 + inputs] == hidden else whole.mT
        for number, expert in enumerate(whole):
            parts = zip(("gate_proj", "up_proj"), expert.chunk(2)) if inputs else [(part, expert)]
            tensors |= {f"{experts}.{number}.{each}.weight": weight.contiguous() for each, weight in parts}
    save_file(tensors, path, metadata={"format": "pt"})


def join_experts(folder: Path, transposed: bool = False) -> None:
    """Stores each layer's experts as transformers holds them, gates above ups; ``transposed``: inputs first."""
    path = folder / "model.safetensors"
    pattern = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight(_scale_inv)?")
    tensors = load_file(path)
    found: dict[tuple[str, str], dict[int, dict[str, torch.Tensor]]] = {}
    for name in list(tensors):
        if match := pattern.fullmatch(name):
            place = match[1], match[4] or ""
            found.setdefault(place, {}).setdefault(int(match[2]), {})[match[3]] = tensors.pop(name)
    for (layer, leaf), experts in found.items():
        of = [experts[number] for number in range(len(experts))]
        gate_up = torch.stack([torch.cat((each["gate"], each["up"])) for each in of])
        for name, whole in (("gate_up_proj", gate_up), ("down_proj", torch.stack([each["down"] for each in of]))):
            tensors[f"{layer}.{name}{leaf}"] = whole.mT.contiguous() if transposed else whole
    save_file(tensors, path, metadata={"format": "pt"})


def _filled(name: str, size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Values of a trained model's order of size: nothing is zero or one, so that no weight can go unnoticed."""
    noise = torch.randn(size, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * noise
    if "lambda" in name:
        return 0.5 + 0.1 * noise
    if len(size) > 1 and "embed" not in name:
        return noise * (1.5 / noise[0].numel() ** 0.5)
    if name.endswith("patch_embeddings.projection.weight"):
        return noise / noise[0].numel() ** 0.5
    return 0.2 * noise


def _new_name(name: str) -> str:
    """A name as transformers 5 saves it."""
    if name.startswith("lm_head"):
        return f"language_model.{name}"
    return name.removeprefix("model.").replace("language_model.", "language_model.model.")


def _chat_vision(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    fixed = {
        "vision_tower.embeddings.cls_token": "vision_model.embeddings.class_embedding",
        "vision_tower.embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
    }
    parts = (
        ("vision_tower.embeddings.patch_embeddings.projection", "vision_model.embeddings.patch_embedding"),
        ("vision_tower.encoder.layer", "vision_model.encoder.layers"),
        ("attention.projection_layer", "attn.proj"),
        ("attention.", "attn."),
        ("layernorm_before", "norm1"),
        ("layernorm_after", "norm2"),
        ("lambda_", "ls"),
        ("multi_modal_projector.layer_norm", "mlp1.0"),
        ("multi_modal_projector.linear_1", "mlp1.1"),
        ("multi_modal_projector.linear_2", "mlp1.3"),
    )
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("language_model.") or ".k_proj" in name or ".v_proj" in name:
            continue
        if ".q_proj" in name:
            tensor = torch.cat([tensors[name.replace(".q_proj", f".{part}_proj")] for part in "qkv"])
            name = name.replace(".q_proj", ".qkv")
        ours = fixed.get(name, name)
        for old, new in parts:
            ours = ours.replace(old, new)
        renamed[ours] = tensor
    return renamed


def _internlm2_text(tensors: dict[str, torch.Tensor], body: dict[str, Any]) -> dict[str, torch.Tensor]:
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    groups, size = body["num_key_value_heads"], body["head_dim"]
    old, new = "language_model.model", "language_model.model"
    out = {
        f"{new}.tok_embeddings.weight": tensors[f"{old}.embed_tokens.weight"],
        f"{new}.norm.weight": tensors[f"{old}.norm.weight"],
    }
    if "language_model.lm_head.weight" in tensors:
        out["language_model.output.weight"] = tensors["language_model.lm_head.weight"]
    for number in range(body["num_hidden_layers"]):
        layer = f"layers.{number}"
        for leaf in ("weight", "bias") if body.get("attention_bias") else ("weight",):
            parts = [
                tensors[f"{old}.{layer}.self_attn.{part}_proj.{leaf}"].unflatten(0, (groups, -1, size))
                for part in "qkv"
            ]
            out[f"{new}.{layer}.attention.wqkv.{leaf}"] = torch.cat(parts, dim=1).flatten(0, 2)
            out[f"{new}.{layer}.attention.wo.{leaf}"] = tensors[f"{old}.{layer}.self_attn.o_proj.{leaf}"]
        for theirs, ours in names.items():
            out[f"{new}.{layer}.feed_forward.{ours}.weight"] = tensors[f"{old}.{layer}.mlp.{theirs}.weight"]
        out[f"{new}.{layer}.attention_norm.weight"] = tensors[f"{old}.{layer}.input_layernorm.weight"]
        out[f"{new}.{layer}.ffn_norm.weight"] = tensors[f"{old}.{layer}.post_attention_layernorm.weight"]
    return out


def _write_processor(folder: Path, shape: Shape, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "backend": "tokenizers",
            "tokenizer_class": "TokenizersBackend",
            "processor_class": "InternVLProcessor",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": IMAGE_TOKEN,
            "video_token": "<video>",
            "extra_special_tokens": [],
            "model_max_length": shape.max_position,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    side = {"height": shape.image_size, "width": shape.image_size}
    image = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "crop_to_patches": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        "min_patches": 1,
        "max_patches": 12,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": side,
    }
    video = {"video_processor_type": "InternVLVideoProcessor", "size": side}
    write_json(
        folder / "processor_config.json",
        {
            "processor_class": "InternVLProcessor",
            "image_seq_length": shape.tokens_per_tile,
            "image_processor": image,
            "video_processor": video,
        },
    )
