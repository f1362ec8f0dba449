"""The suite of ``conformance.py`` for the families of this package."""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints
import tiny_paddleocr_vl
import tiny_qwen2_vl
import tiny_qwen3_vl
import torch
from checkpoints import load_processor
from linear.packers import FORMATS
from models.conformance import (
    TEXTS,
    TURNS,
    Case,
    Expected,
    Reference,
    check_batches,
    check_format,
    check_inputs,
    check_kernels,
    check_memory,
    check_plans,
    check_quantized,
    check_strict_config,
    check_strict_weights,
    check_whole_chain,
    logprobs,
    one_picture,
)
from models.grid_oracle import random_sizes
from models.tiny_families import (
    NEW,
    Family,
    write_internvl,
    write_paddleocr_vl,
    write_qianfan,
    write_qwen2_vl,
    write_qwen3_vl,
)
from PIL import Image
from tiny_checkpoints import Shape, hf_native
from tiny_qwen2_vl import GROUP, LEAST, MOST, QWEN2_5_VL, QWEN2_VL, Kind, picture
from transformers.models.paddleocr_vl.modeling_paddleocr_vl import PaddleOCRVLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from vision.tiny_qwen2_vl_tower import PATCH, config_of

from tessera.kernels import tower_layers
from tessera.kernels.fp8_rows import E4M3, Fp8Rows
from tessera.kernels.operands import AttentionPlan
from tessera.kernels.tower_attention import attend_in_triton
from tessera.models.qwen2_vl.config import PixelRange
from tessera.models.registry import read_config
from tessera.models.tile_policy import THUMBNAIL_RULES, TilePolicy
from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest
from tessera.settings.stages import EngineConfig

DEFAULT = Path(__file__).resolve().parents[2] / "build" / "default_model" / "checkpoint"
# The picture's prompt is longer than Phi-3's trained 32 tokens; heads of 24 are no power of two, as the published 96.
LONGROPE = (
    ("rope_type", "longrope"),
    ("rope_theta", 10000.0),
    ("original_max_position_embeddings", 32),
    ("short_factor", [1.0 + 0.05 * i for i in range(12)]),
    ("long_factor", [1.2 + 0.5 * i for i in range(12)]),
)
DYNAMIC = (("rope_type", "dynamic"), ("rope_theta", 10000.0), ("factor", 2.0))
SIX_B = dict(norm_type="rms_norm", qk_norm=True, attention_bias=False, vision_hidden=80, vision_heads=5)
#: A dense layer between two of experts.
EXPERTS = (("num_experts", 8), ("num_experts_per_tok", 3), ("norm_topk_prob", True), ("mlp_only_layers", [1]))
#: Each body with a tower of another kind.
SHAPES = {
    "qwen2": Shape(rope=DYNAMIC),
    "qwen2, tied, patches of 28": Shape(patch_size=28, tie=True),
    "llama, rms_norm": Shape(text="llama", norm_type="rms_norm"),
    "llama, an earlier layer": Shape(text="llama", feature_layer=-2),
    "qwen3, a tower as the 6B's": Shape(text="qwen3", head_dim=32, **SIX_B),
    "qwen3, tied": Shape(text="qwen3", head_dim=8, tie=True, qk_norm=True, vision_layers=3),
    "qwen3_moe": Shape(text="qwen3_moe", head_dim=32, text_layers=3, experts=EXPERTS),
    "phi3": Shape(text="phi3", text_hidden=96, head_dim=24, text_kv_heads=4, rope=LONGROPE, qk_norm=True),
}
FINAL_NORM = Shape(mean_pooling=False)  # which the original layout does not have

TILES = PreprocessRequest(text="What is this?", images=[picture(640, 480, 3)[0]], tile_policy={"max_tiles": 2})
PICTURES = [picture(56, 84, seed=4), picture(140, 56, seed=5)]
PATCHES = PreprocessRequest(text="<image> and <image>: alike?", images=[data for data, _ in PICTURES])
PICTURES_OF_32 = [picture(64, 96, seed=4), picture(160, 64, seed=5)]  # groups of 32 pixels, as those are of 28
PATCHES_OF_16 = PreprocessRequest(text="<image> and <image>: alike?", images=[data for data, _ in PICTURES_OF_32])


def tiles(folder: Path, prepared: Prepared) -> dict[str, torch.Tensor]:
    values = torch.from_numpy(prepared.pixels.reshape(-1, 448, 448, 3).copy()).permute(0, 3, 1, 2).float() / 255
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
    return {"pixel_values": (values - mean) / std}


def patches(folder: Path, prepared: Prepared) -> dict[str, torch.Tensor]:
    """By transformers' own processor, of pictures that keep their size."""
    processor = tiny_qwen2_vl.reference_processor(folder, LEAST, MOST)
    return processor.image_processor([image for _, image in PICTURES], return_tensors="pt")


def raster_patches(folder: Path, prepared: Prepared) -> dict[str, torch.Tensor]:
    processor = tiny_paddleocr_vl.reference_processor(folder, LEAST, MOST)
    return processor.image_processor([image for _, image in PICTURES], return_tensors="pt")


def patches_of_16(folder: Path, prepared: Prepared) -> dict[str, torch.Tensor]:
    processor = tiny_qwen3_vl.reference_processor(folder, LEAST, MOST)
    return processor.image_processor([image for _, image in PICTURES_OF_32], return_tensors="pt")


def grey_levels(processor: Any, values: torch.Tensor) -> np.ndarray:
    """Of normalised values [n, 3, height, width]: float [n, height, width, 3]."""
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (processor.image_mean, processor.image_std))
    return ((values * std + mean) * 255).permute(0, 2, 3, 1).numpy()


def internvl_reference(processor: Any) -> Reference:
    def theirs(messages: list[dict[str, Any]], images: list[Image.Image], asked: Mapping[str, Any]) -> Expected:
        processor.image_processor.max_patches = asked.get("tile_policy", {}).get("max_tiles", 12)
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
        output = processor(images=images or None, text=prompt, return_tensors="pt")
        ids = output["input_ids"][0].tolist()
        if not images:
            return Expected(ids, np.empty(0), [])
        counts = processor.image_processor(images, crop_to_patches=True)["num_patches"]
        return Expected(ids, grey_levels(processor.image_processor, output["pixel_values"]), [[int(n)] for n in counts])

    return theirs


def qwen2_vl_reference(
    folder: Path, make: Callable[[], Any], processor_of: Callable[..., Any], side: int = 14
) -> Reference:
    """``make`` gives transformers' model, of which the positions are asked; ``side`` of a patch."""
    with torch.device("meta"):
        model = make()

    def theirs(messages: list[dict[str, Any]], images: list[Image.Image], asked: Mapping[str, Any]) -> Expected:
        bounds = asked.get("min_pixels", LEAST), asked.get("max_pixels", MOST)
        processor = processor_of(folder, *bounds)
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
        output = processor(images=images or None, text=prompt, return_tensors="pt")
        ids, grids = output["input_ids"], output.get("image_grid_thw", torch.empty((0, 3), dtype=torch.long))
        kinds = (ids == processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
        positions, deltas = model.get_rope_index(ids, kinds, image_grid_thw=grids)
        assert positions.max() + 1 - ids.shape[1] == deltas.item()  # what a Sequence adds to the length
        grey = np.empty(0)
        if images:
            frames = output["pixel_values"].view(-1, 2, 2, 3, 2, side, side).permute(4, 0, 1, 2, 3, 5, 6)
            assert torch.equal(frames[0], frames[1])
            grey = grey_levels(processor.image_processor, frames[0].flatten(0, 2)).reshape(-1, 2, 2, side, side, 3)
        return Expected(ids[0].tolist(), grey, grids.tolist(), positions[:, 0].numpy())

    return theirs


def paddleocr_vl_reference(folder: Path) -> Reference:
    with torch.device("meta"):
        model = PaddleOCRVLModel(tiny_paddleocr_vl.model_config(folder))

    def theirs(messages: list[dict[str, Any]], images: list[Image.Image], asked: Mapping[str, Any]) -> Expected:
        processor = tiny_paddleocr_vl.reference_processor(
            folder, asked.get("min_pixels", LEAST), asked.get("max_pixels", MOST)
        )
        in_parts = [  # the template passes over a plain text
            turn | {"content": [{"type": "text", "text": turn["content"]}]}
            if isinstance(turn["content"], str)
            else turn
            for turn in messages
        ]
        prompt = processor.apply_chat_template(in_parts, add_generation_prompt=True)
        output = processor(images=images or None, text=prompt, return_tensors="pt")
        ids, grids = output["input_ids"], output.get("image_grid_thw", torch.empty((0, 3), dtype=torch.long))
        positions, deltas = model.get_rope_index(ids, output["mm_token_type_ids"], image_grid_thw=grids)
        assert positions.max() + 1 - ids.shape[1] == deltas.item()
        grey = np.empty(0)
        if images:
            patches = output["pixel_values"].split(grids.prod(1).tolist())
            groups = [
                each.unflatten(0, (rows // 2, 2, columns // 2, 2)).transpose(1, 2).flatten(0, 3)
                for each, (_, rows, columns) in zip(patches, grids.tolist(), strict=True)
            ]
            grey = grey_levels(processor.image_processor, torch.cat(groups)).reshape(-1, 2, 2, 14, 14, 3)
        return Expected(ids[0].tolist(), grey, grids.tolist(), positions[:, 0].numpy())

    return theirs


PREFILL_IN_PARTS = EngineConfig(block_size=4, max_sequences=4, max_batched_tokens=16)
CASES = {
    **{f"internvl, {name}": Case(partial(write_internvl, shape=shape), TILES, tiles) for name, shape in SHAPES.items()},
    "internvl, final norm, names of transformers 4.52": Case(
        partial(write_internvl, shape=FINAL_NORM, prefix="model."), TILES, tiles
    ),
    "qianfan_ocr": Case(write_qianfan, TILES, tiles),
    **{
        f"{kind.layout}, {'tied' if tied else 'untied'}, {'flat' if flat else 'nested'}": Case(
            partial(write_qwen2_vl, tied=tied, flat=flat, kind=kind),
            PATCHES,
            patches,
            kinds=True,
            engine=PREFILL_IN_PARTS,
        )
        for kind in (QWEN2_VL, QWEN2_5_VL)
        for tied, flat in ((False, False), (True, True))
    },
    **{
        f"paddleocr_vl, {name}": Case(
            partial(write_paddleocr_vl, **options), PATCHES, raster_patches, kinds=True, engine=PREFILL_IN_PARTS
        )
        for name, options in {
            "as published": {"names": "published"},
            "tied, names of transformers' modules": {"tied": True, "names": "5"},
            "biases": {"bias": True},
        }.items()
    },
    **{
        f"qwen3_vl, {name}": Case(
            partial(write_qwen3_vl, **options), PATCHES_OF_16, patches_of_16, kinds=True, engine=PREFILL_IN_PARTS
        )
        for name, options in {"untied": {}, "tied": {"tied": True}, "experts": {"text": tiny_qwen3_vl.EXPERTS}}.items()
    },
}
RELATIVES = {kind.layout: kind for kind in (QWEN2_VL, QWEN2_5_VL)}
FAMILIES: dict[str, Callable[[Path], Any]] = {
    "internvl": partial(write_internvl, shape=SHAPES["qwen2"]),
    "qianfan_ocr": write_qianfan,
    **{name: partial(write_qwen2_vl, kind=kind) for name, kind in RELATIVES.items()},
    "paddleocr_vl": write_paddleocr_vl,
    "qwen3_vl": write_qwen3_vl,
}


def model_of(kind: Kind) -> Any:
    return kind.model(tiny_qwen2_vl.model_config(kind=kind)).model


REFERENCES: dict[str, Callable[[Path], Reference]] = {
    **{
        name: partial(
            qwen2_vl_reference,
            make=partial(model_of, kind),
            processor_of=partial(tiny_qwen2_vl.reference_processor, kind=kind),
        )
        for name, kind in RELATIVES.items()
    },
    "paddleocr_vl": paddleocr_vl_reference,
    "qwen3_vl": partial(
        qwen2_vl_reference,
        make=lambda: Qwen3VLModel(tiny_qwen3_vl.model_config()),
        processor_of=tiny_qwen3_vl.reference_processor,
        side=16,
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    FAMILIES[request.param](folder)
    return folder


def is_internvl(folder: Path) -> bool:
    """Whether its pictures are tiles."""
    return read_config(folder).model_type in ("internvl", "qianfan_ocr")


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[Preprocessor, Reference]:
    if read_config(folder).model_type == "qianfan_ocr":
        return Preprocessor.from_checkpoint(folder), internvl_reference(tiny_checkpoints.qianfan_processor(folder))
    if is_internvl(folder):
        return Preprocessor.from_checkpoint(DEFAULT), internvl_reference(load_processor(DEFAULT))
    return Preprocessor.from_checkpoint(folder), REFERENCES[read_config(folder).model_type](folder)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_and_log_probabilities_are_those_of_transformers(tmp_path: Path, case: Case) -> None:
    check_whole_chain(case, tmp_path)


@pytest.mark.parametrize(
    ("text", "body"),
    [
        ("internlm2", "llama, rms_norm"),
        ("qwen2", "qwen2"),
        ("qwen2", "qwen2, tied, patches of 28"),
        ("qwen3", "qwen3, a tower as the 6B's"),
        ("qwen3_moe", "qwen3_moe"),
        ("phi3", "phi3"),
    ],
)
def test_the_original_layout_gives_its_native_twins_logits(tmp_path: Path, text: str, body: str) -> None:
    native = hf_native(tmp_path / "native", SHAPES[body])
    chat = tiny_checkpoints.as_internvl_chat(native, tmp_path / "chat", text=text)
    prepared = Preprocessor.from_checkpoint(chat)(TILES)  # its own template and tokenizer; the twin gets the same ids
    for ours, twin in zip(logprobs(chat, prepared), logprobs(native, prepared), strict=True):
        assert [token for token, _ in ours] == [token for token, _ in twin]
        assert [value for _, value in ours] == pytest.approx([value for _, value in twin], abs=1e-3)


def test_pictures_of_many_sizes_are_cut_as_by_transformers(both: tuple[Preprocessor, Reference]) -> None:
    """Some keep their size in one family or the other; the rest is enlarged or shrunk."""
    kept = [(448, 448), (896, 448), (28, 112), (140, 196), (196, 84), (112, 112), (32, 128), (160, 192)]
    sizes = [*kept, (640, 480), (333, 1000), (1000, 97), (31, 17), (461, 449)]
    sizes += np.exp(np.random.default_rng(2).uniform(2.3, 5.8, (4, 2))).astype(int).tolist()
    for seed, (width, height) in enumerate(sizes):
        check_inputs(*both, one_picture("What is it?"), [picture(width, height, seed)])


def test_pictures_between_texts_over_several_turns(both: tuple[Preprocessor, Reference]) -> None:
    check_inputs(*both, TURNS, [picture(60, 90, seed=4), picture(140, 50, seed=5), picture(33, 33, seed=6)])


@pytest.mark.parametrize("text", TEXTS)
def test_text_alone(both: tuple[Preprocessor, Reference], text: str) -> None:
    check_inputs(*both, [{"role": "user", "content": text}], [])


def test_bounds_of_a_request_as_the_processor_s_own(folder: Path, both: tuple[Preprocessor, Reference]) -> None:
    policies: list[dict[str, Any]] = [{"tile_policy": {"max_tiles": most}} for most in (1, 2, 6)]
    if not is_internvl(folder):
        bounds = ((4, 6), (30, 40), (100, 100))
        policies = [{"min_pixels": least * GROUP, "max_pixels": most * GROUP} for least, most in bounds]
    for asked in policies:
        check_inputs(*both, one_picture("?"), [picture(150, 210, seed=3)], asked)


def test_a_plan_is_known_by_its_wire_form(folder: Path) -> None:
    if is_internvl(folder):
        check_plans(folder, random_sizes(300), [TilePolicy(thumbnail=rule) for rule in THUMBNAIL_RULES])
    else:
        sizes = [size for size in random_sizes(300) if max(size) <= 200 * min(size)]
        check_plans(folder, sizes, [PixelRange(LEAST, MOST), PixelRange(GROUP, 4000 * GROUP)])


def test_settings_that_nobody_reads_are_named(folder: Path) -> None:
    check_strict_config(folder)


def test_missing_and_left_over_vision_weights_are_named(folder: Path) -> None:
    check_strict_weights(folder)


def test_pictures_together_have_the_rows_of_each_alone(folder: Path) -> None:
    sizes = ((448, 448), (56, 84), (140, 56))
    preprocess = Preprocessor.from_checkpoint(folder)
    requests = [PreprocessRequest(text="?", images=[picture(*size, seed=1)[0]]) for size in sizes]
    check_batches(folder, [preprocess(request) for request in requests])


@pytest.mark.parametrize(("quantization", "kind"), [("checkpoint", "float32"), ("fp8", "fp8")])
def test_the_stage_says_what_it_serves(folder: Path, quantization: str, kind: str) -> None:
    check_quantized(folder, quantization, kind)


@pytest.fixture(scope="module", params=NEW)
def quantizable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Family]:
    """A family, and a wide body of it whose experts have matrices of their own, as all quantized forms want it."""
    folder, family = tmp_path_factory.mktemp("wide"), NEW[request.param]
    family.write(folder, **family.wide)
    tiny_checkpoints.split_experts(folder)
    return folder, family


@pytest.mark.parametrize("form", FORMATS)
def test_bodies_in_every_format(quantizable: tuple[Path, Family], tmp_path: Path, form: str) -> None:
    written, family = quantizable
    check_format(shutil.copytree(written, tmp_path / "folder"), FORMATS[form], family.ignore)


TOWERS = {
    "internvl": Shape(image_size=56, patch_size=14, hidden_act="gelu_pytorch_tanh"),
    "internvl of other norms": Shape(
        image_size=56, patch_size=14, norm_type="rms_norm", qk_norm=True, hidden_act="silu"
    ),
}
WITHIN = partial(attend_in_triton, plan=AttentionPlan(rows=32, tokens=16, warps=4, stages=2))


@pytest.mark.parametrize(
    ("family", "chosen"),
    [
        *product(("internvl", "qwen3_vl"), [{"epilogue": True}]),
        *product((*TOWERS, *RELATIVES, "paddleocr_vl", "qwen3_vl"), ({}, {"fp8": True})),
    ],
    ids=str,
)
def test_the_kernels_of_a_gpu_give_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, chosen: dict[str, Any]
) -> None:
    """Without one by triton's interpreter, whose cast to e4m3 loses carries: torch does it."""
    pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")
    hf_native(tmp_path, TOWERS[family]) if family in TOWERS else FAMILIES[family](tmp_path)
    if "fp8" in chosen:
        if torch.cuda.is_available():
            pytest.skip("tests/gpu has it in bfloat16, which FP8 is computed in there")
        by_torch = tower_layers.fp8_linear
        monkeypatch.setattr("tessera.vision.fp8_tower.gate_tiles", lambda shape: torch.ones(1, *shape).byte())
        monkeypatch.setattr("tessera.kernels.fp8_rows.ROWS_DTYPE", torch.float32)
        monkeypatch.setattr(
            tower_layers, "fp8_linear", lambda x, *rest: by_torch(Fp8Rows(x.values.to(E4M3), x.scales), *rest)
        )
    wires = [(2, 1, 2)]
    if family not in TOWERS:
        wires, chosen = [(1, 6, 4), (1, 2, 2), (1, 8, 10)], chosen | {"within": WITHIN}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_kernels(tmp_path, wires, device, **chosen)


@pytest.mark.parametrize(
    ("which", "dtype"),
    [("tiny", "float32"), ("default", "float32"), ("as the 6B", "float32"), ("as the 6B", "bfloat16")],
)
def test_activations_are_estimated_from_above(tmp_path: Path, which: str, dtype: str) -> None:
    # Five heads of 128, four inner rows for one outer as there; patches enough that they are the most there is.
    sizes = dict(vision_hidden=640, vision_heads=5, vision_mlp=2560, vision_layers=1, patch_size=14)
    shape = Shape(norm_type="rms_norm", qk_norm=True, **sizes) if which == "as the 6B" else Shape()
    config = read_config(DEFAULT if which == "default" else hf_native(tmp_path, shape))
    side = config.vision.image_size
    check_memory(config, dtype, torch.zeros(2, side, side, 3, dtype=torch.uint8), (), 3, random_weights=False)


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype"),
    [
        (QWEN2_VL, dict(mlp_ratio=4), "float32"),
        (QWEN2_VL, dict(mlp_ratio=4), "bfloat16"),
        (QWEN2_VL, dict(mlp_ratio=4, embed_dim=32), "float32"),
        (QWEN2_VL, dict(mlp_ratio=4, embed_dim=320, num_heads=4), "bfloat16"),
        (QWEN2_5_VL, dict(intermediate_size=428), "float32"),
        (QWEN2_5_VL, dict(intermediate_size=428), "bfloat16"),
        (QWEN2_5_VL, dict(intermediate_size=28, hidden_size=32), "float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("grids", [[(40, 40)], [(10, 10)] * 8 + [(40, 20)]], ids=["one picture", "nine"])
def test_activations_are_in_proportion_to_the_patches(
    tmp_path: Path, kind: Kind, sizes: dict[str, int], dtype: str, grids: list[tuple[int, int]]
) -> None:
    pixels, wires = torch.zeros(400, 2, 2, PATCH, PATCH, 3, dtype=torch.uint8), [(1, *grid) for grid in grids]
    check_memory(config_of(tmp_path, kind, **sizes), dtype, pixels, wires, 1.5, random_weights=True)


@pytest.mark.parametrize(("heads", "dtype"), [(2, "float32"), (2, "bfloat16"), (4, "bfloat16")])
def test_activations_beside_a_grid_of_positions_are_estimated_from_above(
    tmp_path: Path, heads: int, dtype: str
) -> None:
    """Heads of 72, filled up to 80, are the most there is beside four inner rows for one outer, as published."""
    write_paddleocr_vl(tmp_path)
    sizes = dict(hidden_size=72 * heads, num_attention_heads=heads, intermediate_size=269 * heads)
    tiny_qwen2_vl.edit(tmp_path, vision_config=sizes)
    pixels = torch.zeros(400, 2, 2, PATCH, PATCH, 3, dtype=torch.uint8)
    check_memory(read_config(tmp_path), dtype, pixels, [(1, 10, 10)] * 8 + [(1, 40, 20)], 1.5, random_weights=True)
