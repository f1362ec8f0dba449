"""Checkpoints of Qwen2-VL and its relatives that we quantized: `transformers` reads them and says the same of a picture
as our stages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantize_fakes
import tiny_paddleocr_vl
import torch
from safetensors.torch import load_file
from tiny_qwen2_vl import (
    LEAST,
    MOST,
    QWEN2_5_VL,
    QWEN2_VL,
    Kind,
    as_saved_by_4_52,
    picture,
    reference_processor,
    write_model,
)

from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest
from tessera.vision.encoder import VisionEncoder
from tessera.vision.pictures import VisionItem

TOKENS = 8
TOWER = {
    QWEN2_VL: {f"model.visual.blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")},
    QWEN2_5_VL: {
        f"model.visual.blocks.{block}.{name}"
        for block in range(2)
        for name in ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    },
}
MERGER = {"model.visual.merger.mlp.0", "model.visual.merger.mlp.2"}


@torch.inference_mode()
def answers(
    folder: Path, reference_processor: Callable[..., Any] = reference_processor, size: tuple[int, int] = (56, 84)
) -> tuple[list[int], list[int], int]:
    """The greedy tokens of our stages and of transformers about a picture, and how many weights it misses."""
    from transformers import AutoModelForImageTextToText

    data, image = picture(*size, seed=4)
    prepared = Preprocessor.from_checkpoint(folder)(PreprocessRequest(text="<image> What is it?", images=[data]))
    (rows,) = VisionEncoder.from_checkpoint(folder).encode(
        [VisionItem(prepared.pixels, prepared.plan, prepared.digest)]
    )
    prompt = prepared.input_ids, prepared.spans, rows, prepared.digest
    (ours,) = quantize_fakes.greedy(folder, [prompt], TOKENS, prepared.positions)

    model, told = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if model.config.model_type == "paddleocr_vl":
        tiny_paddleocr_vl.as_trained(model.model)
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.startswith("language_model."):
            # compressed-tensors 0.19 takes all rows of a matrix for one token; the tower's rows are a token each
            module.register_forward_pre_hook(lambda _, inputs: inputs[0][None])
            module.register_forward_hook(lambda _, inputs, output: output[0])
    pixels = reference_processor(folder, LEAST, MOST).image_processor([image], return_tensors="pt")
    ids = torch.from_numpy(prepared.input_ids.astype(np.int64))[None]
    for _ in range(TOKENS):
        kinds = (ids == model.config.image_token_id).int()
        logits = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **pixels).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ours, ids[0, -TOKENS:].tolist(), sum(map(len, (told["missing_keys"], told["unexpected_keys"])))


@pytest.mark.parametrize(
    ("kind", "method", "changes", "tied", "saved"),
    [
        (QWEN2_VL, "awq", {}, False, "5"),
        (QWEN2_VL, "gptq", {"symmetric": True}, True, "5"),
        (QWEN2_VL, "rtn", {"vision_fp8": True}, False, "4.52"),
        (QWEN2_VL, "fp8", {"vision_fp8": True}, False, "5"),
        (QWEN2_5_VL, "awq", {}, True, "4.52"),
        (QWEN2_5_VL, "gptq", {"vision_fp8": True}, False, "5"),
        (QWEN2_5_VL, "fp8", {"vision_fp8": True}, False, "5"),
    ],
    ids=str,
)
def test_transformers_says_the_same_of_a_picture(
    tmp_path: Path, kind: Kind, method: str, changes: dict[str, Any], tied: bool, saved: str
) -> None:
    source, tower = tmp_path / "source", TOWER[kind]
    write_model(source, tied=tied, kind=kind, min_pixels=LEAST, max_pixels=MOST)
    if saved == "4.52":
        as_saved_by_4_52(source)
    pictures = quantize_fakes.labelled_folder(tmp_path / "pictures")
    out = quantize_fakes.made(quantize_fakes.job(source, tmp_path / "out", pictures, method, **changes))
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    others = MERGER if "vision_fp8" in changes else tower | MERGER
    assert set(config["ignore"]) == others | {"lm_head"}
    if "vision_fp8" in changes and method != "fp8":
        assert set(config["config_groups"]["group_1"]["targets"]) == tower
    stored = {name for file in out.glob("*.safetensors") for name in load_file(file)}
    scaled = {name.removesuffix("_scale") for name in stored if name.endswith("weight_scale")}
    before = set(load_file(source / "model.safetensors"))
    assert scaled <= before and len(scaled) == 2 * 7 + len(tower) * ("vision_fp8" in changes)
    assert stored - scaled - {name for name in stored if "_proj.weight_" in name or name.endswith("_scale")} <= before

    ours, theirs, missed = answers(out)
    assert ours == theirs and len(set(ours)) > 1 and missed == 0


@pytest.mark.parametrize(
    ("method", "changes", "tied", "named"),
    [
        ("awq", {}, False, tiny_paddleocr_vl.as_published),
        ("rtn", {"vision_fp8": True}, True, tiny_paddleocr_vl.as_saved_by_5),
    ],
)
def test_transformers_says_the_same_of_an_element(
    tmp_path: Path, method: str, changes: dict[str, Any], tied: bool, named: Callable[[Path], Path]
) -> None:
    """PaddleOCR-VL, whose tower stores q, k and v apart, and whose published names are not its modules'."""
    source = tmp_path / "source"
    tiny_paddleocr_vl.write_model(source, tied, min_pixels=LEAST, max_pixels=MOST)
    pictures = quantize_fakes.labelled_folder(tmp_path / "pictures")
    out = quantize_fakes.made(quantize_fakes.job(named(source), tmp_path / "out", pictures, method, **changes))
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert {"lm_head", "model.projector.linear_1", "model.projector.linear_2"} <= set(config["ignore"])
    stored = {name for file in out.glob("*.safetensors") for name in load_file(file)}
    assert len([name for name in stored if name.endswith("weight_scale")]) == 2 * 7 + 2 * 6 * ("vision_fp8" in changes)
    ours, theirs, missed = answers(out, tiny_paddleocr_vl.reference_processor)
    assert ours == theirs and len(set(ours)) > 1 and missed == 0
