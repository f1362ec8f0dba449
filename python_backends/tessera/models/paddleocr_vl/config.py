"""transformers' layout of PaddleOCR-VL, ``PaddleOCRVLForConditionalGeneration``.

The text model's settings lie in ``text_config`` (newer savers) or in config.json itself (published files). Defaults:
``configuration_paddleocr_vl.py`` and ``image_processing_paddleocr_vl.py``; weight names: ``modeling_paddleocr_vl.py``,
and those that published files have: ``conversion_mapping.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tessera.checkpoint.config import BodyNames, CheckpointConfig, NameTable
from tessera.checkpoint.files import one_of, read_processor, section
from tessera.checkpoint.weights import WB, WBS
from tessera.models.qwen2_vl.config import MODULE_NAMES, RelativeConfig, read_pixel_range, read_vision
from tessera.models.text.config import TextSpec, assemble

PROCESSORS = tuple(f"PaddleOCRVLImageProcessor{way}" for way in ("", "Fast", "Pil"))

_VISUAL = r"(?:model\.)?visual\.vision_model\."
_LAYER = rf"{_VISUAL}encoder\.layers\.(\d+)\."
_PROJECTOR = r"(?:mlp_AR|(?:model\.)?projector)\."
VISION_NAMES: NameTable = (
    (rf"{_VISUAL}embeddings\.patch_embedding\.{WB}", r"patch_embedding.\1"),
    (rf"{_VISUAL}embeddings\.position_embedding\.weight", "position_embedding"),
    (rf"{_LAYER}layer_norm([12])\.{WB}", r"layers.\1.norm\2.\3"),
    (rf"{_LAYER}self_attn\.([qkv]_proj)\.{WBS}", r"layers.\1.attention.\2.\3"),
    (rf"{_LAYER}self_attn\.out_proj\.{WBS}", r"layers.\1.attention.output.\2"),
    (rf"{_LAYER}mlp\.fc([12])\.{WBS}", r"layers.\1.mlp.linear\2.\3"),
    (rf"{_VISUAL}post_layernorm\.{WB}", r"projector.final_norm.\1"),
    (rf"{_PROJECTOR}pre_norm\.{WB}", r"projector.norm.\1"),
    (rf"{_PROJECTOR}linear_([12])\.{WBS}", r"projector.linear\1.\2"),
    # Of training, or of SigLIP: published files have them, and no picture's rows follow from them.
    (rf"{_VISUAL}embeddings\.packing_position_embedding\.weight", ""),
    (rf"{_VISUAL}head\.(?:probe|(?:attention|layernorm|mlp)\.[\w.]+)", ""),
)
_TEXT_DEFAULTS = dict(
    vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_hidden_layers=18, num_attention_heads=16,
    num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
)  # fmt: skip
#: ERNIE-4.5's shape, but with Llama's rotation of halves over three axes (ERNIE's own turns neighbours)
BODY = TextSpec(
    "PaddleOCRTextModel",
    "paddleocr_vl_text",
    "tessera.models.text.decoder:Qwen2",
    BodyNames(),
    _TEXT_DEFAULTS,
    ("attention_bias", False),
    ropes=(),
    mlp_switch=True,
)
_THETA, _SECTIONS = 500000.0, [16, 24, 24]
# What stands beside the text model's settings where these lie in config.json itself.
_BESIDE_TEXT = (
    *("text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id"),
    "vision_end_token_id",
)
# What published files state of the text model's code, and all that transformers' does.
_FIXED = {"compression_ratio": 1.0, "rope_is_neox_style": True, "use_3d_rope": True}
# What they state without a change to any answer: of training, of a bias that no head has, of a kernel.
_WITHOUT_EFFECT = (
    *("attention_probs_dropout_prob", "ignored_index", "max_sequence_length", "use_flash_attention"),
    "weight_share_add_bias",
)
_SIZE = {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536}


@dataclass(frozen=True)
class VisionConfig(RelativeConfig):
    """Of one frame; beside the relatives' names it has SigLIP's."""

    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    num_channels: Literal[3] = 3
    image_size: int = 384
    layer_norm_eps: float = 1e-6
    temporal_patch_size: int = 1

    @property
    def grid_side(self) -> int:
        """Rows, and columns, of the grid of positions."""
        return self.image_size // self.patch_size

    # What Qwen2-VL's calls them.
    @property
    def depth(self) -> int:
        return self.num_hidden_layers

    @property
    def num_heads(self) -> int:
        return self.num_attention_heads


def read(folder: Path, raw: dict[str, Any]) -> CheckpointConfig:
    """The configuration of a folder whose config.json is ``raw``. Raises CheckpointError."""
    where, processor = f"{folder}/config.json", read_processor(folder)
    tower = {name: value for name, value in section(raw, "vision_config", where).items() if name != "tokens_per_second"}
    # Files state frames, which this tower does not have, and how fast a video's go by.
    vision = read_vision(VisionConfig, tower, processor, f"{where}: vision_config", PROCESSORS, temporal_patch_size=1)
    stated = section(raw, "text_config", where) if raw.get("text_config") else raw
    config = assemble(
        folder,
        raw,
        {"rope_theta": _THETA} | _text(stated, f"{where}: text model's "),
        tie=raw.get("tie_word_embeddings", True) or stated.get("tie_word_embeddings", True),
        mrope_section=_SECTIONS,
        bodies=(BODY,),
        vision_names=VISION_NAMES,
        module_names=((_PROJECTOR, "model.projector."), *MODULE_NAMES),
        layout="paddleocr_vl",
        vision=vision,
        pictures=read_pixel_range(processor, _SIZE),
        image_token_id=raw.get("image_token_id", 100295),
    )
    one_of(len(config.text.mrope_section or ()), (3,), f"{where}: the number of axes in mrope_section")
    return config


def _text(stated: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The text model's section in the words of :data:`BODY`; ``use_bias`` is that of every linear layer."""
    for name, value in _FIXED.items():
        one_of(stated.get(name, value), (value,), prefix + name)
    for name in ("attention_bias", "mlp_bias"):
        one_of(stated.get(name), (None,), f"{prefix}{name} beside use_bias")
    bias = bool(stated.get("use_bias"))
    passed = {"use_bias", *_FIXED, *_WITHOUT_EFFECT, *_BESIDE_TEXT}
    text = {name: value for name, value in stated.items() if name not in passed}
    # Only what the body is counts: in config.json itself architectures name the whole model.
    return text | dict(attention_bias=bias, mlp_bias=bias, model_type=BODY.model_type, architectures=None)
