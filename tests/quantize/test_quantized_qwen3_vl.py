"""Qwen3-VL checkpoints that we quantized, on a picture's rows of several depths: as `transformers` computes them."""

import json
from pathlib import Path

import numpy as np
import pytest
import quantize_fakes
import tiny_qwen3_vl
import torch
from quantize.test_quantized_towers import answers
from tiny_qwen2_vl import LEAST, MOST, picture

from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest
from tessera.vision.encoder import VisionEncoder
from tessera.vision.pictures import VisionItem

SIZE = {"shortest_edge": LEAST, "longest_edge": MOST}
TOWER = {f"model.visual.blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")}
MERGERS = {
    f"model.visual.{merger}.linear_fc{number}" for merger in ("merger", "deepstack_merger_list.0") for number in (1, 2)
}


@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_transformers_says_the_same_of_a_picture(tmp_path: Path, method: str) -> None:
    """Of a tower of one layer: from the next on, roundings to e4m3 that fall the other way would add up."""
    source, one = tmp_path / "source", dict(depth=1, deepstack_visual_indexes=[0])
    tiny_qwen3_vl.write_model(source, dict(head_dim=32), one, tied=method == "fp8", size=SIZE)
    pictures = quantize_fakes.labelled_folder(tmp_path / "pictures")
    changes = {"symmetric": True, "vision_fp8": method == "fp8"}
    out = quantize_fakes.made(quantize_fakes.job(source, tmp_path / "out", pictures, method, **changes))
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    whole = {"lm_head", "model.visual.pos_embed"} | MERGERS
    assert set(config["ignore"]) == whole | (set() if method == "fp8" else TOWER)
    ours, theirs, missed = answers(out, tiny_qwen3_vl.reference_processor, size=(64, 96))
    assert ours == theirs and len(set(ours)) > 1 and missed == 0


@torch.inference_mode()
def test_the_body_layer_by_layer_has_the_logits_of_transformers(tmp_path: Path) -> None:
    """Which is what calibration and the report see."""
    model = tiny_qwen3_vl.write_model(tmp_path, size=SIZE)
    data, image = picture(64, 96, seed=4)
    prepared = Preprocessor.from_checkpoint(tmp_path)(PreprocessRequest(text="<image> What is it?", images=[data]))
    (rows,) = VisionEncoder.from_checkpoint(tmp_path).encode(
        [VisionItem(prepared.pixels, prepared.plan, prepared.digest)]
    )
    ids = torch.from_numpy(prepared.input_ids.astype(np.int64))
    pixels = tiny_qwen3_vl.reference_processor(tmp_path, LEAST, MOST).image_processor([image], return_tensors="pt")
    kinds = (ids[None] == model.config.image_token_id).int()
    expected = model(input_ids=ids[None], mm_token_type_ids=kinds, use_cache=False, **pixels).logits[0]
    torch.testing.assert_close(quantize_fakes.layer_by_layer(tmp_path, prepared, rows), expected, atol=1e-3, rtol=0)
