"""Writers of a tiny checkpoint of each family, weights and tokenizer included: each gives transformers' model of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
_QWEN2, _QWEN3, _EXPERTS = Shape(), Shape(text="qwen3", head_dim=32), Shape(text="qwen3_moe", head_dim=32)


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
    sizes that it keeps."""

    write: Callable[[Path], Any]
    processor: Callable[[Path], Any]
    pictures: tuple[tuple[int, int], ...]


def _within(processor: Callable[..., Any]) -> Callable[[Path], Any]:
    return lambda folder: processor(folder, LEAST, MOST)


_TILES = (448, 448), (896, 448), (448, 448)
_OF_28, _OF_32 = ((140, 168), (56, 84), (112, 196)), ((128, 160), (64, 96), (96, 192))
_QWEN3_VL = _within(tiny_qwen3_vl.reference_processor)
#: the families that no checkpoint of ours has
NEW = {
    "qwen2_5_vl": Family(
        partial(write_qwen2_vl, flat=True, kind=QWEN2_5_VL),
        _within(partial(tiny_qwen2_vl.reference_processor, kind=QWEN2_5_VL)),
        _OF_28,
    ),
    "qwen3_vl": Family(write_qwen3_vl, _QWEN3_VL, _OF_32),
    "qwen3_vl, experts": Family(partial(write_qwen3_vl, text=tiny_qwen3_vl.EXPERTS), _QWEN3_VL, _OF_32),
    "paddleocr_vl": Family(
        partial(write_paddleocr_vl, names="published"), _within(tiny_paddleocr_vl.reference_processor), _OF_28
    ),
    "qianfan_ocr": Family(write_qianfan, tiny_checkpoints.qianfan_processor, _TILES),
    "internvl, experts": Family(partial(write_internvl, shape=_EXPERTS), load_processor, _TILES),
}
