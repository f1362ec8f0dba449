"""Writers of a tiny checkpoint of each family, weights and tokenizer included: each gives transformers' model of it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tiny_checkpoints
import tiny_paddleocr_vl
import tiny_qwen2_vl
import tiny_qwen3_vl
import torch
from checkpoints import load_processor
from tiny_checkpoints import Shape, hf_native
from tiny_qwen2_vl import LEAST, MOST, QWEN2_5_VL, QWEN2_VL, Kind

#: what differs from a writer's own sizes of the text model
Sizes = Mapping[str, Any]
_NONE: Sizes = MappingProxyType({})
_QWEN2, _QWEN3, _EXPERTS = Shape(), Shape(text="qwen3", head_dim=32), Shape(text="qwen3_moe", text_mlp=128)


def write_internvl(folder: Path, shape: Shape = _QWEN2, prefix: str = "") -> Any:
    return _read(hf_native(folder, shape, prefix=prefix))


def write_qianfan(folder: Path, shape: Shape = _QWEN3) -> Any:
    native = hf_native(folder / "native", shape)
    return _read(tiny_checkpoints.as_qianfan(native, folder, tiny_checkpoints.QIANFAN_TEMPLATE))


def write_qwen2_vl(
    folder: Path, tied: bool = False, flat: bool = False, kind: Kind = QWEN2_VL, text: Sizes = _NONE
) -> Any:
    model = tiny_qwen2_vl.write_model(folder, text, tied, kind, min_pixels=LEAST, max_pixels=MOST)
    if flat:
        tiny_qwen2_vl.flatten(folder)
    return model


def write_paddleocr_vl(
    folder: Path, tied: bool = False, bias: bool = False, names: str = "", text: Sizes = _NONE
) -> Any:
    model = tiny_paddleocr_vl.write_model(folder, tied, bias, text, min_pixels=LEAST, max_pixels=MOST)
    if names:
        {"published": tiny_paddleocr_vl.as_published, "5": tiny_paddleocr_vl.as_saved_by_5}[names](folder)
    return model


def write_qwen3_vl(folder: Path, tied: bool = False, text: Sizes = _NONE) -> Any:
    size = {"shortest_edge": LEAST, "longest_edge": MOST}
    return tiny_qwen3_vl.write_model(folder, text, tied=tied, size=size)


def _read(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


class Family(NamedTuple):
    """``write``: a folder with the names of published files. ``processor``: transformers' own of it. ``pictures``:
    sizes that it keeps. ``wide``: how it is written with a body that is wider than a block of 128, and whose
    feed-forward layers end within one. ``ignore``: what configurations list that leave the first layer's downs, the
    tower and the head as they are."""

    write: Callable[..., Any]
    processor: Callable[[Path], Any]
    pictures: tuple[tuple[int, int], ...]
    wide: Mapping[str, Any]
    ignore: tuple[str, ...]


def _within(processor: Callable[..., Any]) -> Callable[[Path], Any]:
    return lambda folder: processor(folder, LEAST, MOST)


_TILES = (448, 448), (896, 448), (448, 448)
_OF_28, _OF_32 = ((140, 168), (56, 84), (112, 196)), ((128, 160), (64, 96), (96, 192))
_QWEN3_VL = _within(tiny_qwen3_vl.reference_processor)
_WIDE = dict(hidden_size=256, num_attention_heads=4, intermediate_size=320, num_hidden_layers=2)
_HEADS = dict(head_dim=64, num_hidden_layers=3)  # more layers than depths of Qwen3-VL's rows
_SHAPE = dict(text_hidden=256, head_dim=64, text_mlp=320)
# As llm-compressor's example for Qwen3-VL with experts has it (examples/quantization_w8a8_fp8).
_PATTERNS = ("re:.*lm_head", "re:visual.*", "re:model.visual.*", "re:.*mlp.gate$")
_DOWN = "layers.0.mlp.down_proj"
#: the families that no checkpoint of ours has
NEW = {
    "qwen2_5_vl": Family(
        partial(write_qwen2_vl, flat=True, kind=QWEN2_5_VL),
        _within(partial(tiny_qwen2_vl.reference_processor, kind=QWEN2_5_VL)),
        _OF_28,
        {"text": _WIDE},
        ("visual", "lm_head", f"model.{_DOWN}")),
    "qwen3_vl": Family(
        write_qwen3_vl,
        _QWEN3_VL,
        _OF_32,
        {"text": _WIDE | _HEADS},
        ("lm_head", "model.visual.merger.linear_fc1", f"model.language_model.{_DOWN}")),
    "qwen3_vl, experts": Family(
        partial(write_qwen3_vl, text=tiny_qwen3_vl.EXPERTS),
        _QWEN3_VL,
        _OF_32,
        {"text": _WIDE | _HEADS | tiny_qwen3_vl.EXPERTS | {"moe_intermediate_size": 192}},
        (*_PATTERNS, r"re:model\.language_model\.layers\.0\.mlp\.experts\.\d+\.down_proj$")),
    "paddleocr_vl": Family(
        partial(write_paddleocr_vl, names="published"),
        _within(tiny_paddleocr_vl.reference_processor),
        _OF_28,
        {"text": _WIDE | {"head_dim": 64}},
        ("visual", "mlp_AR", "lm_head", f"model.{_DOWN}")),
    "qianfan_ocr": Family(
        write_qianfan,
        tiny_checkpoints.qianfan_processor,
        _TILES,
        {"shape": replace(_QWEN3, **_SHAPE)},
        ("vision_model", "mlp1", "language_model.lm_head", f"language_model.model.{_DOWN}")),
    "internvl, experts": Family(
        partial(write_internvl, shape=_EXPERTS),
        load_processor,
        _TILES,
        {"shape": replace(_EXPERTS, **{**_SHAPE, "text_mlp": 384})},
        (*("vision_tower", "multi_modal_projector", "language_model.lm_head"),
            *(f"language_model.model.layers.0.mlp.experts.{number}.down_proj" for number in range(8)))),
}  # fmt: skip
