"""transformers' layout of Qwen3-VL, ``Qwen3VLForConditionalGeneration`` and ``Qwen3VLMoeForConditionalGeneration``.

Defaults: ``configuration_qwen3_vl.py`` and ``configuration_qwen3_vl_moe.py``; weight names: ``modeling_qwen3_vl.py``.
The image processor is Qwen2-VL's class with that one's defaults (``image_processing_auto.py``), so that a folder has to
state patches of 16 itself.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tessera.checkpoint.config import CheckpointConfig, NameTable, architecture_of
from tessera.checkpoint.files import one_of, read_processor, section
from tessera.checkpoint.weights import WB, WBS
from tessera.errors import CheckpointError
from tessera.models.qwen2_vl.config import MODULE_NAMES, RelativeConfig, read_pixel_range, read_vision
from tessera.models.text.config import BODIES, assemble

_TOWER = r"(?:model\.)?visual\."
_LAYER, _DEEP = rf"{_TOWER}blocks\.(\d+)\.", rf"{_TOWER}deepstack_merger_list\.(\d+)\."
VISION_NAMES: NameTable = (
    (rf"{_TOWER}patch_embed\.proj\.{WB}", r"patch_embedding.\1"),
    (rf"{_TOWER}pos_embed\.weight", "position_embedding"),
    (rf"{_LAYER}norm([12])\.{WB}", r"layers.\1.norm\2.\3"),
    (rf"{_LAYER}attn\.qkv\.{WBS}", r"layers.\1.attention.qkv.\2"),
    (rf"{_LAYER}attn\.proj\.{WBS}", r"layers.\1.attention.output.\2"),
    (rf"{_LAYER}mlp\.linear_fc([12])\.{WBS}", r"layers.\1.mlp.linear\2.\3"),
    (rf"{_TOWER}merger\.norm\.{WB}", r"projector.norm.\1"),
    (rf"{_TOWER}merger\.linear_fc([12])\.{WBS}", r"projector.linear\1.\2"),
    (rf"{_DEEP}norm\.{WB}", r"projector.deep.\1.norm.\2"),
    (rf"{_DEEP}linear_fc([12])\.{WBS}", r"projector.deep.\1.linear\2.\3"),
)
_QWEN3, _QWEN3_MOE = (next(body for body in BODIES if body.model_type == kind) for kind in ("qwen3", "qwen3_moe"))
_DENSE = replace(
    _QWEN3,
    architecture="Qwen3VLTextModel",
    model_type="qwen3_vl_text",
    model="tessera.models.qwen3_vl.body:Qwen3VL",
    defaults=dict(_QWEN3.defaults, max_position_embeddings=128000),
)
_MOE_SIZES = dict(intermediate_size=5632, num_attention_heads=16, num_key_value_heads=16)
_MOE_EXPERTS = dict(num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408, norm_topk_prob=True)
_EXPERTS = replace(
    _QWEN3_MOE,
    architecture="Qwen3VLMoeTextModel",
    model_type="qwen3_vl_moe_text",
    model="tessera.models.qwen3_vl.body:Qwen3VLMoe",
    defaults={**_QWEN3_MOE.defaults, **_MOE_SIZES, "max_position_embeddings": 128000},
    experts={**(_QWEN3_MOE.experts or {}), **_MOE_EXPERTS},
)
#: the text models
TEXT_BODIES = (_DENSE, _EXPERTS)
# config.json's names of a model whose text model has experts
_OF_EXPERTS = ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe")
_THETA, _SECTIONS = 500000.0, [24, 20, 20]


@dataclass(frozen=True)
class VisionConfig(RelativeConfig):
    """``out_hidden_size`` is the width of the rows.

    Behind each layer of ``deepstack_visual_indexes`` the tower gives rows for a layer of the language model: the first
    of them for the first.
    """

    depth: int = 27
    num_heads: int = 16
    patch_size: int = 16
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    @property
    def grid_side(self) -> int:
        """Rows, and columns, of the grid of positions."""
        return math.isqrt(self.num_position_embeddings)


def read(folder: Path, raw: dict[str, Any]) -> CheckpointConfig:
    """The configuration of a folder whose config.json is ``raw``. Raises CheckpointError."""
    where, processor = f"{folder}/config.json", read_processor(folder)
    body = _EXPERTS if architecture_of(raw) in _OF_EXPERTS else _DENSE
    text = {"model_type": body.model_type, "rope_theta": _THETA, **section(raw, "text_config", where)}
    stated, prefix = section(raw, "vision_config", where), f"{where}: vision_config"
    deep = _read_indexes(stated.get("deepstack_visual_indexes"), f"{prefix}.deepstack_visual_indexes")
    vision = read_vision(VisionConfig, stated, processor, prefix, deepstack_visual_indexes=deep)
    if deep and deep[-1] >= vision.depth:
        raise CheckpointError(
            f"{prefix}.deepstack_visual_indexes {list(deep)}: there are {vision.depth} layers, from 0"
        )
    if vision.grid_side**2 != vision.num_position_embeddings:
        raise CheckpointError(
            f"{prefix}.num_position_embeddings {vision.num_position_embeddings} is no square: the grid's rows are as "
            "many as its columns"
        )
    config = assemble(
        folder,
        raw,
        text | {"architectures": None},  # the body is known by its type, as to transformers
        tie=raw.get("tie_word_embeddings") or text.get("tie_word_embeddings", False),
        mrope_section=_SECTIONS,
        bodies=(body,),
        mrope_interleaved=True,
        row_depth=1 + len(deep),
        vision_names=VISION_NAMES,
        module_names=MODULE_NAMES,
        layout="qwen3_vl",
        vision=vision,
        pictures=read_pixel_range(processor),
        image_token_id=raw.get("image_token_id", 151655),
    )
    if config.text.experts is not None:  # their weights always sum to one, whatever a file says
        one_of(config.text.experts.norm_topk_prob, (True,), f"{where}: text model's norm_topk_prob")
    one_of(vision.out_hidden_size, (config.text.hidden_size,), f"{prefix}.out_hidden_size")
    if len(deep) >= config.text.num_hidden_layers:
        raise CheckpointError(
            f"{prefix}.deepstack_visual_indexes {list(deep)}: the text model must have more layers than these, not "
            f"{config.text.num_hidden_layers}"
        )
    return config


def _read_indexes(stated: Any, where: str) -> tuple[int, ...]:
    """In ascending order: transformers would take the mergers of others in another order than it makes their rows."""
    if stated is None:
        return VisionConfig.deepstack_visual_indexes
    numbers = isinstance(stated, list) and all(type(index) is int and index >= 0 for index in stated)
    if not numbers or sorted(set(stated)) != stated:
        raise CheckpointError(f"{where} {stated!r:.80} must be numbers of layers in ascending order")
    return tuple(stated)
