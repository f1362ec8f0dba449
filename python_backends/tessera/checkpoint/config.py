"""``config.json`` of either InternVL layout -> one frozen description that the rest of the house reads.

Two layouts are known: ``hf_native`` (transformers' InternVLForConditionalGeneration) and ``internvl_chat``
(the original InternVLChatModel). Values a file omits take the defaults of the class that wrote it
(transformers ``configuration_internvl.py``, ``configuration_qwen2.py``, ``configuration_llama.py``; OpenGVLab
``configuration_intern_vit.py``, ``configuration_internlm2.py``), because savers leave defaults out.
Code named by a checkpoint (``auto_map``) is never looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.checkpoint.names import has_output_head
from tessera.checkpoint.weights import SafetensorsFolder
from tessera.errors import CheckpointError

NORM_TYPES = ("layer_norm", "rms_norm")
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu", "silu")


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower (InternViT). Sizes in pixels; ``image_size`` is the side of the square tiles.

    ``final_norm`` says that a LayerNorm follows the last layer (transformers' ``use_mean_pooling: false``).
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    image_size: int
    patch_size: int
    hidden_act: str
    norm_type: str
    layer_norm_eps: float
    attention_bias: bool
    use_qk_norm: bool
    num_channels: int = 3
    final_norm: bool = False
    qk_norm_eps: float = 1e-6

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size


@dataclass(frozen=True)
class TextConfig:
    """The language model. ``attention_bias`` is q/k/v's, ``output_bias`` the attention output projection's.

    ``rope_scaling`` is None for plain rope, else a dict whose key ``rope_type`` names the rule.
    ``tie_word_embeddings`` is what the weights need: False whenever the checkpoint stores an output head.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    hidden_act: str
    mrope_section: tuple[int, ...] | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    """Everything read from a checkpoint folder except its tensors.

    ``vision_feature_layer`` counts hidden states as the reference does: -1 is the output of the last layer.
    ``image_token_id`` is None where only the tokenizer knows it. ``processor`` merges
    preprocessor_config.json and the image processor's part of processor_config.json. ``dtype`` is the name of
    the stored one, such as "bfloat16".
    """

    folder: Path
    layout: str
    model_type: str
    vision: VisionConfig
    text: TextConfig
    downsample_ratio: float
    ps_version: str
    vision_feature_layer: int
    projector_hidden_act: str
    image_token_id: int | None
    eos_token_ids: tuple[int, ...]
    generation: dict[str, Any]
    raw: dict[str, Any]
    processor: dict[str, Any]
    dtype: str = "float32"

    @property
    def tokens_per_tile(self) -> int:
        """Rows of embeddings that one tile becomes."""
        return int(self.vision.patches_per_side * self.downsample_ratio) ** 2


def read_config(folder: Path | str) -> CheckpointConfig:
    """Read the configuration of a checkpoint folder.

    Raises CheckpointError when config.json is missing, names an architecture that is not supported, or asks
    for something the implementation does not do.
    """
    folder = Path(folder)
    raw = _read_json(folder / "config.json")
    if raw is None:
        raise CheckpointError(f"{folder} has no config.json; name a folder that holds a complete checkpoint")
    architecture = (raw.get("architectures") or [raw.get("model_type")])[0]
    reader = _LAYOUTS.get(architecture)
    if reader is None:
        raise CheckpointError(
            f"{folder}/config.json: architecture {architecture!r} is not supported; supported are "
            "InternVLForConditionalGeneration and InternVLChatModel"
        )
    return reader(folder, raw)


def _read_hf_native(folder: Path, raw: dict[str, Any]) -> CheckpointConfig:
    where = f"{folder}/config.json"
    text_raw = _section(raw, "text_config", where)
    model_type = text_raw.get("model_type") or "qwen2"
    if raw.get("vision_feature_select_strategy", "default") != "default":
        raise CheckpointError(f"{where}: vision_feature_select_strategy must be 'default' (the CLS row is dropped)")
    return _assemble(
        folder,
        raw,
        layout="hf_native",
        vision=_vision(_section(raw, "vision_config", where), _HF_VISION_DEFAULTS, f"{where}: vision_config"),
        text=_text(folder, text_raw, _architecture_of(model_type, where), raw.get("tie_word_embeddings")),
        text_raw=text_raw,
        ps_version="v2",
        vision_feature_layer=raw.get("vision_feature_layer", -1),
        projector_hidden_act=raw.get("projector_hidden_act", "gelu"),
        image_token_id=raw.get("image_token_id", raw.get("image_token_index", 151667)),
    )


def _read_internvl_chat(folder: Path, raw: dict[str, Any]) -> CheckpointConfig:
    where = f"{folder}/config.json"
    text_raw = _section(raw, "llm_config", where)
    vision_raw = dict(_section(raw, "vision_config", where))
    vision_raw["image_size"] = raw.get("force_image_size") or vision_raw.get("image_size", 224)
    architecture = (text_raw.get("architectures") or [_architecture_of(text_raw.get("model_type"), where)])[0]
    return _assemble(
        folder,
        raw,
        layout="internvl_chat",
        vision=_vision(
            {
                **vision_raw,
                "attention_bias": vision_raw.get("qkv_bias", False),
                "use_qk_norm": vision_raw.get("qk_normalization", True),
                "qk_norm_eps": vision_raw.get("layer_norm_eps", 1e-6),
            },
            _CHAT_VISION_DEFAULTS,
            f"{where}: vision_config",
        ),
        text=_text(folder, text_raw, architecture, None),
        text_raw=text_raw,
        ps_version=raw.get("ps_version", "v1"),
        vision_feature_layer=raw.get("select_layer", -1),
        projector_hidden_act="gelu",
        image_token_id=raw.get("img_context_token_id"),
    )


_LAYOUTS = {
    "InternVLForConditionalGeneration": _read_hf_native,
    "internvl": _read_hf_native,
    "InternVLChatModel": _read_internvl_chat,
    "internvl_chat": _read_internvl_chat,
}
_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
}

_HF_VISION_DEFAULTS = dict(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=24,
    num_attention_heads=16,
    image_size=448,
    patch_size=14,
    hidden_act="gelu",
    norm_type="layer_norm",
    layer_norm_eps=1e-6,
    attention_bias=False,
    use_qk_norm=False,
    qk_norm_eps=1e-6,
    num_channels=3,
)
_CHAT_VISION_DEFAULTS = dict(
    _HF_VISION_DEFAULTS,
    hidden_size=3200,
    intermediate_size=12800,
    num_hidden_layers=48,
    num_attention_heads=25,
    norm_type="rms_norm",
)
# What a saver may have left out because it equals the class default.
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": dict(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=22016,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=32768,
    ),
    "LlamaForCausalLM": dict(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=2048,
    ),
    "InternLM2ForCausalLM": dict(
        vocab_size=103168,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=2048,
    ),
}


def _assemble(folder: Path, raw: dict[str, Any], text_raw: Mapping[str, Any], **fields: Any) -> CheckpointConfig:
    where = f"{folder}/config.json"
    if fields["ps_version"] not in ("v1", "v2"):
        raise CheckpointError(f"{where}: ps_version {fields['ps_version']!r} is neither 'v1' nor 'v2'")
    layer = fields["vision_feature_layer"]
    depth = fields["vision"].num_hidden_layers
    if not isinstance(layer, int) or not -depth - 1 <= layer <= depth:
        raise CheckpointError(
            f"{where}: the selected vision layer must be one of the {depth + 1} states, not {layer!r}"
        )
    _one_of(fields["projector_hidden_act"], ACTIVATIONS, f"{where}: projector_hidden_act")
    ratio = float(raw.get("downsample_ratio", 0.5))
    if ratio <= 0 or ratio > 1 or (1 / ratio) % 1 or fields["vision"].patches_per_side % int(1 / ratio):
        raise CheckpointError(
            f"{where}: downsample_ratio {ratio} does not divide a side of {fields['vision'].patches_per_side}"
        )
    generation = _read_json(folder / "generation_config.json") or {}
    eos = generation.get("eos_token_id", text_raw.get("eos_token_id"))
    return CheckpointConfig(
        folder=folder,
        model_type=raw.get("model_type", fields["layout"]),
        downsample_ratio=ratio,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        generation=generation,
        raw=raw,
        processor=_read_processor(folder),
        dtype=_dtype_of(raw) or _dtype_of(text_raw) or "float32",
        **fields,
    )


def _vision(section: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> VisionConfig:
    values = {name: section.get(name, default) for name, default in defaults.items()}
    for name in ("image_size", "patch_size"):
        values[name] = _square(values[name], f"{where}.{name}")
    _one_of(values["norm_type"], NORM_TYPES, f"{where}.norm_type")
    _one_of(values["hidden_act"], ACTIVATIONS, f"{where}.hidden_act")
    if values["hidden_size"] % values["num_attention_heads"]:
        raise CheckpointError(
            f"{where}: {values['num_attention_heads']} heads do not divide {values['hidden_size']} channels"
        )
    if values["image_size"] % values["patch_size"]:
        raise CheckpointError(
            f"{where}: patch_size {values['patch_size']} does not divide image_size {values['image_size']}"
        )
    if not section.get("use_absolute_position_embeddings", True):
        raise CheckpointError(f"{where}: a tower without absolute position embeddings is not supported")
    return VisionConfig(**values, final_norm=not section.get("use_mean_pooling", True))


def _text(folder: Path, section: Mapping[str, Any], architecture: str, tie: bool | None) -> TextConfig:
    where = f"{folder}/config.json"
    if architecture not in _TEXT_DEFAULTS:
        raise CheckpointError(
            f"{where}: text architecture {architecture!r} is not supported; supported are {', '.join(_TEXT_DEFAULTS)}"
        )
    if section.get("use_sliding_window"):
        raise CheckpointError(f"{where}: sliding-window attention is not supported (use_sliding_window is true)")
    values = {name: section.get(name, default) for name, default in _TEXT_DEFAULTS[architecture].items()}
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = section.get("num_key_value_heads", values.get("num_key_value_heads")) or heads
    if heads % values["num_key_value_heads"]:
        raise CheckpointError(f"{where}: {heads} heads do not divide over {values['num_key_value_heads']} key heads")
    _one_of(section.get("hidden_act", "silu"), ("silu",), f"{where}: the text model's hidden_act")
    theta, scaling = _rope(section)
    # Qwen2 has q/k/v biases and no other; Llama and InternLM2 have one switch for q/k/v and output.
    switch = {"LlamaForCausalLM": ("attention_bias", False), "InternLM2ForCausalLM": ("bias", True)}
    bias = bool(section.get(*switch[architecture])) if architecture in switch else None
    tied = section.get("tie_word_embeddings", False) if tie is None else tie
    return TextConfig(
        architecture=architecture,
        head_dim=section.get("head_dim") or values["hidden_size"] // heads,
        rms_norm_eps=section.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=True if bias is None else bias,
        output_bias=bool(bias),
        mlp_bias=architecture == "LlamaForCausalLM" and bool(section.get("mlp_bias", False)),
        # A stored head wins over the flag, as in transformers' tie_weights.
        tie_word_embeddings=bool(tied) and not has_output_head(SafetensorsFolder(folder).names()),
        hidden_act="silu",
        **values,
    )


def _rope(section: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` -> (theta, scaling)."""
    settings = dict(section.get("rope_parameters") or section.get("rope_scaling") or {})
    theta = float(settings.pop("rope_theta", section.get("rope_theta", 10000.0)))
    rule = settings.pop("type", None)
    settings.setdefault("rope_type", rule or "default")
    return theta, None if settings["rope_type"] == "default" else settings


def _read_processor(folder: Path) -> dict[str, Any]:
    whole = _read_json(folder / "processor_config.json") or {}
    merged = dict(_read_json(folder / "preprocessor_config.json") or {})
    merged.update(whole.get("image_processor") or {})
    merged.update({name: value for name, value in whole.items() if not isinstance(value, dict)})
    return merged


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error


def _section(raw: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    section = raw.get(name)
    if not isinstance(section, dict):
        raise CheckpointError(f"{where} has no section {name!r}")
    return section


def _architecture_of(model_type: str | None, where: str) -> str:
    if model_type not in _ARCHITECTURES:
        raise CheckpointError(
            f"{where}: text model_type {model_type!r} is not supported; supported are {', '.join(_ARCHITECTURES)}"
        )
    return _ARCHITECTURES[model_type]


def _dtype_of(section: Mapping[str, Any]) -> str | None:
    name = section.get("dtype") or section.get("torch_dtype")
    return name.removeprefix("torch.") if isinstance(name, str) else None


def _square(value: Any, where: str) -> int:
    sides = set(value) if isinstance(value, list | tuple) else {value}
    if len(sides) != 1 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise CheckpointError(f"{where} must be one positive side length of a square, not {value!r}")
    return sides.pop()


def _one_of(value: Any, allowed: tuple[str, ...], where: str) -> None:
    if value not in allowed:
        raise CheckpointError(f"{where} {value!r} is not supported; supported are {', '.join(allowed)}")
